"""Reading what a command is given: documents, a text, parameters of an engine."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from knnstore.cli.logs import LOG
from knnstore.cli.output import Bar, note, one_line
from knnstore.documents import (
    FIELDS,
    NOT_MEMBERS,
    STDIN,
    UTF8,
    Fields,
    OnBad,
    Reason,
    TextDocument,
    check_paths,
    read_documents,
)
from knnstore.errors import UnusableDocumentError

_MOST_NAMED = 5
"""Names of each reason that are printed, of what was left out; with --json all are."""
_ADVICE: dict[str, str] = {
    Reason.ENCODING: "; save as UTF-8, or give --encoding: cp1252 for Latin-1 and Windows-1252",
    Reason.TOO_LARGE: "; divide it, or write many documents into a .jsonl",
}
"""Advice behind the names of files that were left out for a reason."""

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
            help=".jsonl, .csv, .tsv or .parquet (a row a document: id, text, metadata), .json (an array of "
            "rows, or one row), .mbox (a message a document), .txt, .md, .rst, .html or .ipynb (one "
            "document), a folder of such files, - for standard input, or hf:NAME[:CONFIGURATION[:SPLIT]], a "
            "data set of the Hugging Face hub; any file but parquet may be compressed (.gz). A document has "
            "at most 256 MiB. In a folder, links out of it are left out.",
        ),
    ]
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="The field or column of a row that is its text.")
    ] = FIELDS.text
    id_field: Annotated[
        str, typer.Option(metavar="NAME", help="The field or column of a row that is its id.")
    ] = FIELDS.id
    encoding: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The encoding of the files, by Python's name for it, such as cp1252 or utf-16.",
        ),
    ] = UTF8
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Report documents that cannot be used, and go on without them. What a folder has of them "
            "is left out in any case.",
        ),
    ] = False
    skipped: int = field(default=0, init=False)
    """How many cannot be used and were left out."""
    ignored: int = field(default=0, init=False)
    """How many files of folders are of another kind."""
    unknown: int = field(default=0, init=False)
    """How many of the skipped have an id that nobody knows."""
    first: str = field(default="", init=False)
    """Why the first of the skipped cannot."""
    kept: set[str] = field(default_factory=set, init=False)
    """The ids of the others of them."""
    named: dict[str, list[str]] = field(default_factory=dict, init=False)
    """By reason the files and rows that were left out; of unusable ones the whole message."""

    @property
    def fields(self) -> Fields:
        """Which fields of a row are its text and its id."""
        return Fields(self.text_field, self.id_field)

    def check(self) -> None:
        """Refuse what cannot be read, before the work begins.

        Raises:
            InputError: a file is not there, of no kind that is read, or its first row cannot be used.
        """
        if not self.skip_bad:
            check_paths(self.files, self.fields, self.encoding)

    def read(self, bar: Bar) -> Iterator[TextDocument]:
        """Read them; those that are left out are counted, and reported above a bar where that is asked for.

        Raises:
            InputError: on reading, a document that was named cannot be used and is not to be left out.
        """

        def ignore(file: Path) -> None:
            self.ignored += 1
            self.named.setdefault(Reason.KIND, []).append(str(file))
            if LOG.verbose:
                bar.say(f"ignored {file}: no kind of file that is read")

        return read_documents(
            self.files,
            fields=self.fields,
            encoding=self.encoding,
            on_bad=self.skipping(bar),
            on_ignored=ignore,
        )

    def skipping(self, bar: Bar) -> OnBad:
        """Return what counts a document that cannot be used, and raises its error where it is to be used."""

        def skip(error: UnusableDocumentError) -> None:
            if not (error.in_folder or self.skip_bad):
                raise error
            self.skipped += 1
            self.first = self.first or one_line(error)
            name = one_line(error) if error.reason == Reason.OTHER else error.where
            self.named.setdefault(error.reason, []).append(name or one_line(error))
            if error.reason not in NOT_MEMBERS:
                if error.id is None:
                    self.unknown += 1
                else:
                    self.kept.add(error.id)
            if self.skip_bad or LOG.verbose:
                bar.say(f"skipped {one_line(error)}")

        return skip

    def report(self) -> None:
        """Say how much was left out, if anything."""
        parts = []
        if self.skipped:
            parts.append(f"{self.skipped:,} that cannot be used")
        if self.ignored:
            parts.append(f"{self.ignored:,} {'file' if self.ignored == 1 else 'files'} of another kind")
        if parts:
            named = "" if LOG.verbose else " (-v names them)" + (f": {self.first}" if self.first else "")
            note(f"left out {' and '.join(parts)}{named}")
        if not (LOG.verbose or self.skip_bad):  # else each was named already
            for reason, names in self.named.items():
                shown = names[:_MOST_NAMED]
                if len(names) > _MOST_NAMED:
                    shown.append(f"{len(names) - _MOST_NAMED:,} more")
                if reason == Reason.OTHER:  # each has a message of its own
                    note(f"  {reason} ({len(names):,}):")
                    for one in shown:
                        note(f"    {one}")
                else:
                    note(f"  {reason} ({len(names):,}): {', '.join(shown)}{_ADVICE.get(reason, '')}")

    @property
    def left_out(self) -> dict[str, Any]:
        """Counts of the files and documents that were left out, and all names by reason, for `--json`."""
        return {"skipped": self.skipped, "ignored": self.ignored, "left_out": self.named}

    @property
    def counts(self) -> dict[str, int]:
        """The counts of what was left out, for a table."""
        return {"skipped": self.skipped, "ignored": self.ignored}


@dataclass
class AnyDocuments(Documents):
    """The documents of some files, if any are given."""

    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", show_default=False, help="Held-out text; files as of `add`."),
    ] = ()  # type: ignore[assignment]


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
