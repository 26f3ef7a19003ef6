"""The command that measures perplexity."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnstore.cli.models import open_model
from knnstore.cli.options import (
    DEFAULT_HOME,
    DeviceOption,
    DtypeOption,
    FilesArgument,
    HomeOption,
    JsonOption,
    SkipBadOption,
    read_params,
)
from knnstore.cli.output import Bar, note, one_line, print_json, print_json_lines, printable
from knnstore.cli.query import Query, SelectionOptions
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore import KNNStore, Selection
    from knnstore.errors import InputError
    from knnstore.lm import Substitute


def evaluate(
    files: FilesArgument,
    *,
    selected: SelectionOptions,
    query: Query,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out", help="A document that is in the store does not retrieve from itself."),
    ] = False,
    substitute: Annotated[
        bool,
        typer.Option(
            "--substitute",
            help="Measure beside it the substitute trained for these domains, without any retrieval.",
        ),
    ] = False,
    skip_bad: SkipBadOption = False,
    per_token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a row for each token: JSON Lines where the name ends in .jsonl, else "
            "tab-separated values.",
        ),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="A parameter of the engine in place of the store's, this time; repeatable.",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity with and without the store.

    The documents should not be in the store. Prints a JSON object (tokens, base_ppl, knn_ppl, the
    same for words and bytes, helped: the share of tokens to which retrieval gives more probability
    than the model, k, temperature, lambda, mixer, tokens_per_s and more), with --json on one line.
    by_frequency and by_distance divide the tokens by how often they are stored and by how near the
    nearest neighbour is. With a continuous cache store_ppl is that of the mixture without it, and
    cache_ppl that of the model with the cache alone.

    Examples:
      knnstore eval held-out.jsonl
      knnstore eval held-out.jsonl --per-token tokens.tsv
      knnstore eval held-out.jsonl --cache 400 --cache-lambda 0.1
      knnstore eval held-out.jsonl --pointers 8 --clusters 1000
      knnstore eval held-out.jsonl --domain news --k 64 --temperature 20 --lambda 0.5 --json
    """
    from knnstore.documents import is_among, read_documents
    from knnstore.lm import TokenTable, replacing

    if per_token is not None and is_among(per_token, files):
        raise ConfigError(
            f"--per-token would replace {per_token}, which is to be evaluated: name another file"
        )
    bad: list[InputError] = []

    def skip(error: "InputError") -> None:
        bad.append(error)
        note(f"skipped {one_line(error)}")

    table = None if per_token is None else TokenTable()
    with Bar() as bar, ExitStack() as opened:
        # Opened first: that it cannot be written is to be known before the work.
        file = None if per_token is None else opened.enter_context(replacing(per_token))
        lm = open_model(home, "r", device=device, dtype=dtype, params=read_params(params))
        with lm.store:
            selection = selected.selection()
            settings = query.settings(lm.store, selection)
            found = lm.evaluate(
                read_documents(files, on_bad=skip if skip_bad else None),
                knn=settings,
                substitute=trained_substitute(lm.store, selection) if substitute else None,
                leave_out=leave_out,
                table=table,
                progress=bar,
            )
        if file is not None and table is not None and per_token is not None and lm.tokenizer is not None:
            table.write(file, lm.tokenizer, as_json=per_token.suffix == ".jsonl")
    if found.stored and not leave_out:
        note(
            f"warning: {len(found.stored):,} of these documents are among those retrieved from, "
            f"{found.stored[0]!r} for one: what they should predict is looked up; --leave-out prevents it"
        )
    result = asdict(found)
    result = {"lambda" if name == "lam" else name: value for name, value in result.items()}
    result["skipped"] = len(bad)
    (print_json if as_json else print_json_lines)(result)


def trained_substitute(store: "KNNStore", selection: "Selection") -> "Substitute":
    """The substitute that was trained on exactly these domains.

    Raises:
        ConfigError: there is none.
    """
    from knnstore.lm import trained_for

    if selection.tags:
        raise ConfigError("a substitute is of whole domains and knows no tags: leave out --tag")
    found = trained_for(store, selection)
    if found is None:
        options = "".join(f" --domain {printable(name)}" for name in selection.domains or ())
        raise ConfigError(f"no substitute was trained on exactly this: run knnstore substitute{options}")
    return found
