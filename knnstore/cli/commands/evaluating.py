"""The command `eval`, which measures perplexity, and the text forms of its result."""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.inputs import Documents, read_params
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, LeaveOutOption
from knnstore.cli.output import Bar, note, pairs, plain, print_result
from knnstore.cli.output import table as table_of
from knnstore.cli.retrieval_options import ScoringQuery, SelectionOptions
from knnstore.documents import TextDocument, is_among
from knnstore.errors import ConfigError, KnnstoreError

if TYPE_CHECKING:
    from knnstore.lm import Evaluation


def evaluate(
    *,
    selected: SelectionOptions,
    query: ScoringQuery,
    leave_out: LeaveOutOption = False,
    documents: Documents,
    per_token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a row for each token: JSON Lines where the name ends in .jsonl, else "
            "tab-separated values.",
        ),
    ] = None,
    audited: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Also check the figures on a sample: that the mixture sums to 1 and is what was scored, "
            "that no token saw itself or a later one, that no text is in the store, that both were scored on "
            "the same tokens. Exit status 1 if a check fails.",
        ),
    ] = False,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="A parameter of the engine in place of the store's, this time; repeatable.",
        ),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Print also every other figure, and perplexity by how often a token is stored and by how "
            "near its nearest neighbor is.",
        ),
    ] = False,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity with and without the store.

    The documents should not be in the store. Prints the perplexity of the model alone and of the mixture, by
    token, word and byte. "helped" is the share of tokens to which retrieval gives a higher probability than
    the model. With a continuous cache or n-grams, it also prints the perplexities with the store, the cache
    and the n-grams alone. --json has all values: base_ppl, knn_ppl, store_ppl, cache_ppl, ngram_ppl,
    by_frequency, by_distance and more.

    Examples:
      knnstore eval held-out.jsonl
      knnstore eval held-out.jsonl --details
      knnstore eval held-out.jsonl --per-token tokens.tsv
      knnstore eval held-out.jsonl --cache 400 --cache-lambda 0.1
      knnstore eval held-out.jsonl --ngrams 7 --ngram-lambda 0.5
      knnstore eval held-out.jsonl --audit
      knnstore eval held-out.jsonl --domain news --k 64 --knn-temperature 20 --lambda 0.5 --json
    """
    if per_token is not None and is_among(per_token, documents.files):
        raise ConfigError(
            f"--per-token would replace {per_token}, which is to be evaluated: name another file"
        )
    documents.check()
    if per_token is not None:
        check_writable(per_token)
    with Bar() as bar, ExitStack() as opened:
        lm = opened.enter_context(
            runtime.open_model("r", params=read_params(params), domains=selected.domains)
        )
        from knnstore.lm import TokenTable, replacing, usable_documents

        table = None if per_token is None else TokenTable()
        file = None if per_token is None else opened.enter_context(replacing(per_token))
        selection = selected.selection()
        settings = query.settings(lm.store, selection)
        texts: Iterable[TextDocument] = documents.read(bar)
        if audited:  # the audit reads the documents a second time
            texts = list(usable_documents(lm.reader, texts, documents.skipping(bar)))
        found = lm.evaluate(
            texts,
            knn=settings,
            leave_out=leave_out,
            table=table,
            on_bad=documents.skipping(bar),
            progress=bar,
        )
        is_default = query.is_default(lm.store, selection)
        if file is not None and table is not None and per_token is not None and lm.tokenizer is not None:
            table.write(file, lm.tokenizer, as_json=per_token.suffix == ".jsonl")
        report = lm.audit(texts, settings) if audited else None
    if found.stored and not leave_out:
        note(
            f"warning: {len(found.stored):,} of these documents are among those retrieved from, "
            f"{found.stored[0]!r} for one: what they should predict is looked up; --leave-out prevents it"
        )
    if found.fitted and query.lam is None:
        note(
            f"warning: to {len(found.fitted):,} of these documents the settings were fitted, "
            f"{found.fitted[0]!r} for one: on other text expect a higher perplexity"
        )
    documents.report()
    result = {**plain(found), **documents.left_out, "intervals": intervals_of(found)}
    del result["by_document"]
    if report is not None:
        result["audit"] = {"passed": report.passed, **plain(report)}
    shown = [summary(result), *(["\n\n", details_of(result)] if details else [])]
    print_result(result, shown, as_json=as_json)
    if is_default and not as_json:
        note("these are default settings: `knnstore calibrate` fits them, to other text or the store's")
    if report is not None:
        for check in report.checks:
            note(f"{'passed' if check.passed else 'FAILED'}: {check.name} ({check.found})")
        if not report.passed:
            raise KnnstoreError("the audit found what makes these figures doubtful, see above")


def summary(result: Mapping[str, Any]) -> str:
    """Format the main figures of an evaluation in about ten lines."""
    sides = {"model alone": "base", "with the store": "knn"}
    perplexities = [
        {"": name, **{title: result[f"{side}_{unit}ppl"] for title, side in sides.items()}}
        for name, unit in (("perplexity", ""), ("of a word", "word_"), ("of a byte", "byte_"))
    ]
    lam, temperature = result["lambda"], result["temperature"]
    reach = f"k {result['k']:,}" if result["probes"] is None else f"{result['probes']:,} probes"
    parts = {"store": "the store", "cache": "the cache", "ngram": "n-grams"}
    alone = {f"{name} alone": result[f"{part}_ppl"] for part, name in parts.items()}
    rest = {
        **{name: ppl for name, ppl in alone.items() if ppl is not None},
        "documents": result["documents"],
        "tokens": result["tokens"],
        "helped": f"{result['helped']:.1%}",
        "settings": f"{result['mixer']}, lambda {lam:.3g}, T {temperature:.4g}, {reach}",
        "speed": f"{result['tokens_per_s']:,.0f} tokens/s",
    }
    return f"{table_of(perplexities, ['', *sides])}\n\n{pairs(rest)}"


def details_of(result: Mapping[str, Any]) -> str:
    """Format the figures that `summary` leaves out, and tables of perplexities by groups of tokens."""
    said = {"documents", "tokens", "tokens_per_s", "k", "probes", "temperature", "lambda", "mixer", "helped"}
    plain_values = {
        name: value
        for name, value in result.items()
        if not (
            value is None or isinstance(value, list | tuple | dict) or name in said or name.endswith("ppl")
        )
    }
    slices = {
        "times stored": result["by_frequency"],
        "distance to the nearest": result["by_distance"],
    }
    return "\n\n".join([pairs(plain_values), *(_sliced(name, rows) for name, rows in slices.items())])


def _sliced(name: str, rows: Any) -> str:
    columns = ["tokens", "base_ppl", "knn_ppl", "helped"]
    shown = [
        {**row, name: f"{row['low']:g} - {row['high']:g}", "helped": f"{row['helped']:.1%}"} for row in rows
    ]
    return table_of(shown, [name, *columns])


def check_writable(file: Path) -> None:
    """Check before the work that a file can be created.

    Raises:
        ConfigError: if its folder is missing or cannot be written to.
    """
    folder = file.resolve().parent
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{file} cannot be written: {folder} is not there, or cannot be written")


def intervals_of(found: "Evaluation") -> dict[str, dict[str, float]]:
    """Return the confidence intervals of an evaluation by name, as dicts."""
    return {name: interval._asdict() for name, interval in found.intervals._asdict().items()}
