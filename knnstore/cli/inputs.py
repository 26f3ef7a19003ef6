"""Input of commands: documents in files, a text, and parameters of an engine."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.logs import LOG
from knnstore.cli.output import Bar, format_error, print_message
from knnstore.documents import (
    FIELDS,
    NOT_MEMBERS,
    SOURCE,
    STDIN,
    UTF8,
    Fields,
    GitTree,
    OnBad,
    Reason,
    TextDocument,
    check_paths,
    decode_text,
    read_documents,
)
from knnstore.errors import ConfigError, InputError, UnusableDocumentError

if TYPE_CHECKING:
    from knnstore.store import KNNStore

_MAX_PRINTED_NAMES = 5
"""Number of left-out files and rows that are printed for each reason; ``--json`` prints all."""
_ADVICE: dict[str, str] = {
    Reason.ENCODING: "; save as UTF-8, or give --encoding: cp1252 for Latin-1 and Windows-1252",
    Reason.TOO_LARGE: "; divide it, or write many documents into a .jsonl",
}
"""Advice that is printed after the left-out files of a reason."""

ParamsOption = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="Parameter of the vector engine; repeatable."),
]


TextFieldOption = Annotated[
    str, typer.Option(metavar="NAME", help="The field or column of a row that is its text.")
]
SourceFieldOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=SOURCE,
        help="For an encoder-decoder model: the field or column of a row that is the source of its text, "
        "such as the sentence that the text translates.",
    ),
]


@dataclass
class Documents:
    """Options that name files of documents, and counts of the documents that are left out.

    Read the documents of one object only once, because reading adds to the counts.
    """

    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help=".jsonl, .csv, .tsv or .parquet (a row a document: id, text, metadata), .json (an array of "
            "rows, or one row), .mbox (a message a document), .tmx and .xlf (a unit a document; --text-field "
            "and --source-field are languages, such as de), .txt, .md, .rst, .html or .ipynb (one "
            "document), a folder of such files, - for standard input, or hf:NAME[:CONFIGURATION[:SPLIT]], a "
            "data set of the Hugging Face hub; any file but parquet may be compressed (.gz). A document has "
            "at most 256 MiB. In a folder, links out of it are left out.",
        ),
    ]
    text_field: TextFieldOption = FIELDS.text
    id_field: Annotated[
        str, typer.Option(metavar="NAME", help="The field or column of a row that is its id.")
    ] = FIELDS.id
    source_field: SourceFieldOption = None
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
            help="Report documents that cannot be used, and go on without them. Unusable files in a folder "
            "are left out in any case.",
        ),
    ] = False
    skipped: int = field(default=0, init=False)
    """Number of documents that cannot be used and were left out."""
    ignored: int = field(default=0, init=False)
    """Number of files in folders that have an unsupported type."""
    skipped_without_id: int = field(default=0, init=False)
    """Number of skipped documents whose id cannot be read."""
    first_error: str = field(default="", init=False)
    """Error message of the first skipped document; empty without one."""
    skipped_ids: set[str] = field(default_factory=set, init=False)
    """Ids of skipped documents, as far as known; `sync` does not remove these documents from the store."""
    names_by_reason: dict[str, list[str]] = field(default_factory=dict, init=False)
    """Names of the left-out files and rows, by the reason why they were left out; for the reason OTHER their
    error messages."""

    @property
    def fields(self) -> Fields:
        """Names of the fields of a row that hold its text, its id, and its source.

        Without ``--source-field`` there is no field for the source; a model that reads sources then takes
        them from the metadata.

        Raises:
            ConfigError: text and source have the same field.
        """
        if self.source_field == self.text_field:
            raise ConfigError(
                "--source-field and --text-field name the same field: give two different fields"
            )
        return Fields(self.text_field, self.id_field, self.source_field)

    def check_files(self) -> None:
        """Check the files before the work begins. Does nothing with ``--skip-bad``.

        Raises:
            InputError: if a file is missing, has an unsupported type, or its first row cannot be used.
        """
        if not self.skip_bad:
            check_paths(self.files, self.fields, self.encoding)

    def expect_pairs(self, *, is_paired: bool) -> None:
        """Choose whether rows are read as pairs of source and text, as an encoder-decoder model needs them.

        Call it before `read_documents`. For pairs, the source field gets its default name if
        ``--source-field`` was not given.

        Args:
            is_paired: True for an encoder-decoder model.

        Raises:
            ConfigError: if ``--source-field`` was given and the model reads no pairs.
        """
        if not is_paired and self.source_field is not None:
            raise ConfigError("--source-field is for encoder-decoder models: leave it out")
        if is_paired and self.source_field is None:
            self.source_field = SOURCE

    def read_documents(self, bar: Bar) -> Iterator[TextDocument]:
        """Return an iterator over the documents. It counts the documents that it leaves out.

        With ``--verbose`` left-out files and documents are printed above `bar`; with ``--skip-bad`` unusable
        documents are printed.

        Raises:
            InputError: raised by the iterator, if a document outside of folders cannot be used, and
                ``--skip-bad`` was not given.
        """

        def ignore(file: Path) -> None:
            """Count a file of an unsupported type, and print its name with ``--verbose``."""
            self.ignored += 1
            self.names_by_reason.setdefault(Reason.KIND, []).append(str(file))
            if LOG.verbose:
                bar.print_above(f"ignored {file}: files of this type are not read")

        return read_documents(
            self.files,
            fields=self.fields,
            encoding=self.encoding,
            on_bad=self.make_skip_function(bar),
            on_ignored=ignore,
        )

    def make_skip_function(self, bar: Bar) -> OnBad:
        """Return the callback for unusable documents: it takes the error, and counts or raises it.

        The error is counted with ``--skip-bad``, or if the document is a file in a folder. Otherwise it is
        raised.

        Args:
            bar: the progress bar, above which skipped documents are printed.
        """

        def skip(error: UnusableDocumentError) -> None:
            """Count an unusable document, or raise its error."""
            if not (error.in_folder or self.skip_bad):
                raise error
            self.skipped += 1
            self.first_error = self.first_error or format_error(error)
            name = format_error(error) if error.reason == Reason.OTHER else error.where
            self.names_by_reason.setdefault(error.reason, []).append(name or format_error(error))
            if error.reason not in NOT_MEMBERS:
                if error.id is None:
                    self.skipped_without_id += 1
                else:
                    self.skipped_ids.add(error.id)
            if self.skip_bad or LOG.verbose:
                bar.print_above(f"skipped {format_error(error)}")

        return skip

    def report(self) -> None:
        """Print on stderr how many documents were left out, with their names and reasons.

        Names and reasons are not printed again if they were printed while reading. Prints nothing if no
        document was left out.
        """
        counts = []
        if self.skipped:
            counts.append(f"{self.skipped:,} unusable {'document' if self.skipped == 1 else 'documents'}")
        if self.ignored:
            counts.append(
                f"{self.ignored:,} {'file' if self.ignored == 1 else 'files'} of an unsupported type"
            )
        if counts:
            names_by_reason = (
                ""
                if LOG.verbose
                else " (-v names them)" + (f": {self.first_error}" if self.first_error else "")
            )
            print_message(f"left out {' and '.join(counts)}{names_by_reason}")
        if not (LOG.verbose or self.skip_bad):  # otherwise each was named while reading
            for reason, names in self.names_by_reason.items():
                printed_names = names[:_MAX_PRINTED_NAMES]
                if len(names) > _MAX_PRINTED_NAMES:
                    printed_names.append(f"{len(names) - _MAX_PRINTED_NAMES:,} more")
                if reason == Reason.OTHER:  # each name is a whole message, so each gets a line
                    print_message(f"  {reason} ({len(names):,}):")
                    for name_line in printed_names:
                        print_message(f"    {name_line}")
                else:
                    print_message(
                        f"  {reason} ({len(names):,}): {', '.join(printed_names)}{_ADVICE.get(reason, '')}"
                    )

    @property
    def left_out(self) -> dict[str, Any]:
        """Counts of left-out files and documents, and all their names by reason, for ``--json``."""
        return {"skipped": self.skipped, "ignored": self.ignored, "left_out": self.names_by_reason}

    @property
    def counts(self) -> dict[str, int]:
        """Counts of left-out files and documents, for a table."""
        return {"skipped": self.skipped, "ignored": self.ignored}


@dataclass
class AnyDocuments(Documents):
    """Options that name files of documents; the files may be omitted."""

    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE", show_default=False, help="Held-out text; the same kinds of files as for `add`."
        ),
    ] = ()  # type: ignore[assignment]


@dataclass
class SyncDocuments(Documents):
    """Options that name files of documents, or a commit of a git repository."""

    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="Files and folders; the same kinds of files as for `add`.",
        ),
    ] = ()  # type: ignore[assignment]
    git: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Instead of FILE: a git repository. The text files of a commit are the documents; only "
            "files that have changed are read. Ignored and binary files, links and submodules are left out.",
        ),
    ] = None
    ref: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default="HEAD", help="With --git: the branch, tag or commit to read."
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="With --git: use only files whose path matches this pattern, such as '*.py' or 'docs/*'; "
            "repeatable.",
        ),
    ] = None
    tree: GitTree | None = field(default=None, init=False)
    """Files of the commit, with ``--git``; `check_files` reads their names."""

    def check_files(self) -> None:
        """Check the files before the work begins; with ``--git``, find the commit and its files.

        Raises:
            InputError: a file is missing, has an unsupported type, or its first row cannot be used.
            GitError: `git` cannot read the repository.
            typer.BadParameter: neither files nor a repository are given, or both.
        """
        if bool(self.files) == (self.git is not None):
            raise typer.BadParameter("give files or a folder, or a repository with --git")
        if self.git is None:
            if self.ref is not None or self.only:
                raise typer.BadParameter("--ref and --only need --git")
            if STDIN in self.files:
                raise typer.BadParameter(
                    "standard input cannot be compared, because the files are read twice: give files or a "
                    "folder"
                )
            super().check_files()
        else:
            if self.fields != FIELDS:
                raise typer.BadParameter(
                    "--text-field and --id-field are for the rows of files: leave them out with --git"
                )
            self.tree = GitTree(self.git, "HEAD" if self.ref is None else self.ref, self.only or ())

    def expect_pairs(self, *, is_paired: bool) -> None:
        """Choose whether rows are read as pairs of source and text, as the store of the domain has them.

        Args:
            is_paired: True if the store has pairs for an encoder-decoder model.

        Raises:
            ConfigError: if ``--git`` was given and the store has pairs, or ``--source-field`` was given and
                the store has no pairs.
        """
        if is_paired and self.git is not None:
            raise ConfigError(
                "--git needs a store of a causal model, and this store is for an encoder-decoder model"
            )
        super().expect_pairs(is_paired=is_paired)

    def find_unchanged(self, store: "KNNStore", domain: str, tags: Sequence[str]) -> frozenset[str]:
        """Return the ids of the files in the Git commit that the store already has, with the same content.

        These files need not be read. A file counts only if the stored document has the given tags and the
        same metadata, which contain the hash of the content. Without ``--git`` the result is empty.

        Args:
            store: the store, to compare with.
            domain: the domain's name.
            tags: tags that each document must have.
        """
        if self.tree is None:
            return frozenset()
        tree = self.tree
        stored = store.stored_versions(domain, [row.id for row in store.documents(domain=domain)])
        return frozenset(
            id
            for id, version in stored.items()
            if id in tree.blobs
            and version.metadata == tree.describe(id, self.encoding)
            and version.tags.issuperset(tags)
        )

    def copy_to_reread(self) -> "SyncDocuments":
        """Return a copy that has counted nothing yet, to read the same files or the same commit again."""
        copy = replace(self)
        copy.tree = self.tree
        return copy

    def read_documents(self, bar: Bar, unchanged: frozenset[str] = frozenset()) -> Iterator[TextDocument]:
        """Return an iterator over the documents, as `Documents.read_documents` does.

        Args:
            bar: the progress bar, above which skipped documents are printed.
            unchanged: with ``--git``, ids of documents that are not read.
        """
        if self.tree is None:
            return super().read_documents(bar)
        names = [name for name in self.tree.blobs if name not in unchanged]
        return self.tree.read_documents(names, encoding=self.encoding, on_bad=self.make_skip_function(bar))

    def make_skip_function(self, bar: Bar) -> OnBad:
        """Return the callback for unusable documents, as `Documents.make_skip_function` does.

        With ``--git``, an unusable file is not protected from removal: `skipped_ids` stays empty, so `sync`
        removes a stored version of the file, because the commit no longer has this content.
        """
        count_skipped = super().make_skip_function(bar)

        def skip(error: UnusableDocumentError) -> None:
            """Count an unusable document, or raise its error."""
            count_skipped(error)
            if self.tree is not None:
                self.skipped_ids.clear()

        return skip


def read_text(text: str) -> str:
    """Return a text argument unchanged; for ``-``, read the text from standard input."""
    return sys.stdin.read() if text == STDIN else text


def read_lines(file: str) -> list[str]:
    """Read the lines of a UTF-8 file, without line breaks; for ``-``, of standard input.

    Raises:
        InputError: the file is empty, or not text in UTF-8.
        OSError: the file cannot be read.
    """
    data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    try:
        text = decode_text(data)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_params(options: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` options to a dict. A value that is not valid JSON stays text; None gives {}.

    Raises:
        typer.BadParameter: if an option has no name or no ``=``.
    """
    params: dict[str, Any] = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="'--param'")
        try:
            params[name] = json.loads(value)
        except (ValueError, RecursionError):
            params[name] = value
    return params
