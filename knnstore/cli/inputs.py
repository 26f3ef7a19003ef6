"""Reading what a command is given: documents, a text, parameters of an engine."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from knnstore.cli.output import Bar, one_line
from knnstore.documents import STDIN, TextDocument, read_documents
from knnstore.errors import InputError

ParamsOption = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the engine; repeatable."),
]


@dataclass
class Documents:
    """The documents of some files, to be read once."""

    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help=".jsonl (a row a document: id, text, metadata), .txt or .md (one document), a folder of "
            "such files, or - for standard input; each may be compressed (.gz).",
        ),
    ]
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Report documents that cannot be used, and go on without them.")
    ] = False
    skipped: int = field(default=0, init=False)
    """How many were left out."""

    def read(self, bar: Bar) -> Iterator[TextDocument]:
        """Read them; those that are left out are reported above a bar.

        Raises:
            InputError: on reading, a document cannot be used and is not to be left out.
        """

        def skip(error: InputError) -> None:
            self.skipped += 1
            bar.say(f"skipped {one_line(error)}")

        return read_documents(self.files, on_bad=skip if self.skip_bad else None)


def read_text(given: str) -> str:
    """A text from the command line, or standard input in place of ``-``."""
    return sys.stdin.read() if given == STDIN else given


def read_params(given: Sequence[str] | None) -> dict[str, Any]:
    """Read ``NAME=VALUE`` options; values are JSON where they can be, else text.

    Raises:
        typer.BadParameter: one has no ``=``.
    """
    params: dict[str, Any] = {}
    for option in given or ():
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="'--param'")
        try:
            params[name] = json.loads(value)
        except (ValueError, RecursionError):
            params[name] = value
    return params
