"""Reading what a command is given: documents, a text, parameters of an engine."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from knnstore.cli.output import Bar, one_line
from knnstore.documents import STDIN, TextDocument, read_documents
from knnstore.errors import InputError

FilesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
        help=".jsonl (a row a document: id, text, metadata), .txt or .md (one document), a folder of "
        "such files, or - for standard input; each may be compressed (.gz).",
    ),
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Report documents that cannot be used, and go on without them.")
]
ParamsOption = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the engine; repeatable."),
]


class Documents:
    """The documents of some files, to be read once.

    Args:
        files: as `read_documents` takes them.
        skip_bad: whether those that cannot be used are reported and left out.
        bar: to report above.

    Raises:
        InputError: on reading, a document cannot be used and is not to be left out.
    """

    skipped = 0
    """How many were left out."""

    def __init__(self, files: Sequence[str], *, skip_bad: bool, bar: Bar) -> None:
        self._files = files
        self._skip_bad = skip_bad
        self._bar = bar

    def __iter__(self) -> Iterator[TextDocument]:
        return read_documents(self._files, on_bad=self._skip if self._skip_bad else None)

    def _skip(self, error: InputError) -> None:
        self.skipped += 1
        self._bar.say(f"skipped {one_line(error)}")


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
        except ValueError:
            params[name] = value
    return params
