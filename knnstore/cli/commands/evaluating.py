"""The command that measures perplexity."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnstore.cli.inputs import Documents, read_params
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, LeaveOutOption
from knnstore.cli.output import Bar, json_lines, note, plain, print_result, printable
from knnstore.cli.output import table as table_of
from knnstore.cli.query import Query, SelectionOptions
from knnstore.documents import is_among
from knnstore.errors import ConfigError, KnnstoreError

if TYPE_CHECKING:
    from knnstore import KNNStore, Selection
    from knnstore.lm import Substitute


def evaluate(
    *,
    selected: SelectionOptions,
    query: Query,
    leave_out: LeaveOutOption = False,
    substitute: Annotated[
        bool,
        typer.Option(
            "--substitute",
            help="Measure beside it the substitute trained for these domains, without any retrieval.",
        ),
    ] = False,
    documents: Documents,
    per_token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a row for each token: JSON Lines where the name ends in .jsonl, else "
            "tab-separated values.",
        ),
    ] = None,
    size_curve: Annotated[
        bool,
        typer.Option(
            "--size-curve",
            help="Measure with half of what is stored, a quarter and so on to a 64th, from one pass of the "
            "model: what more text would bring.",
        ),
    ] = False,
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
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity with and without the store.

    The documents should not be in the store. Prints a JSON object (tokens, base_ppl, knn_ppl, the
    same for words and bytes, helped: the share of tokens to which retrieval gives more probability
    than the model, k, temperature, lambda, mixer, tokens_per_s and more), with --json on one line.
    by_frequency and by_distance divide the tokens by how often they are stored and by how near the
    nearest neighbor is. With a continuous cache or n-grams store_ppl is that of the mixture without
    them, cache_ppl that of the model with the cache alone, and ngram_ppl that with n-grams alone.
    With --size-curve it prints a table of sizes instead.

    Examples:
      knnstore eval held-out.jsonl
      knnstore eval held-out.jsonl --per-token tokens.tsv
      knnstore eval held-out.jsonl --cache 400 --cache-lambda 0.1
      knnstore eval held-out.jsonl --ngrams 7 --ngram-lambda 0.5
      knnstore eval held-out.jsonl --pointers 8 --clusters 1000
      knnstore eval held-out.jsonl --size-curve
      knnstore eval held-out.jsonl --audit
      knnstore eval held-out.jsonl --domain news --k 64 --temperature 20 --lambda 0.5 --json
    """
    from knnstore.lm import TokenTable, replacing

    if per_token is not None and is_among(per_token, documents.files):
        raise ConfigError(
            f"--per-token would replace {per_token}, which is to be evaluated: name another file"
        )
    if size_curve and (leave_out or substitute or audited or per_token is not None):
        raise ConfigError("--size-curve goes with none of --leave-out, --substitute, --audit and --per-token")
    table = None if per_token is None else TokenTable()
    with Bar() as bar, ExitStack() as opened:
        # Opened first: that it cannot be written is to be known before the work.
        file = None if per_token is None else opened.enter_context(replacing(per_token))
        lm = opened.enter_context(runtime.open_model("r", params=read_params(params)))
        selection = selected.selection()
        settings = query.settings(lm.store, selection)
        texts = list(documents.read(bar)) if audited else documents.read(bar)
        if size_curve:
            curve = lm.measure_size_curve(texts, settings, progress=bar)
            points = [plain(one) for one in curve]
            print_result(points, table_of(points, ["documents", "records", "ppl"]), as_json=as_json)
            return
        found = lm.evaluate(
            texts,
            knn=settings,
            substitute=trained_substitute(lm.store, selection) if substitute else None,
            leave_out=leave_out,
            table=table,
            progress=bar,
        )
        if file is not None and table is not None and per_token is not None and lm.tokenizer is not None:
            table.write(file, lm.tokenizer, as_json=per_token.suffix == ".jsonl")
        report = lm.audit(texts, settings) if audited else None
    if found.stored and not leave_out:
        note(
            f"warning: {len(found.stored):,} of these documents are among those retrieved from, "
            f"{found.stored[0]!r} for one: what they should predict is looked up; --leave-out prevents it"
        )
    result = {**plain(found), "skipped": documents.skipped}
    if report is not None:
        result["audit"] = {"passed": report.passed, **plain(report)}
    print_result(result, json_lines(result), as_json=as_json)
    if report is not None:
        for check in report.checks:
            note(f"{'passed' if check.passed else 'FAILED'}: {check.name} ({check.found})")
        if not report.passed:
            raise KnnstoreError("the audit found what makes these figures doubtful, see above")


def trained_substitute(store: "KNNStore", selection: "Selection") -> "Substitute":
    """The substitute that was trained on exactly these domains; that there is none is an error."""
    from knnstore.lm import trained_for

    if selection.tags or selection.where:
        raise ConfigError("a substitute is of whole domains: leave out --tag and --where")
    found = trained_for(store, selection)
    if found is None:
        options = "".join(f" --domain {printable(name)}" for name in selection.domains or ())
        raise ConfigError(f"no substitute was trained on exactly this: run knnstore substitute{options}")
    return found
