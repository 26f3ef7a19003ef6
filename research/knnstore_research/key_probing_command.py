"""The command ``probe-keys``: compares where keys can be taken, and how many states make one."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.fits import build_fit_row, format_fits_table
from knnstore.cli.inputs import Documents
from knnstore.cli.models import Runtime, silence_transformers
from knnstore.cli.options import JsonOption, MaxLengthOption
from knnstore.cli.output import Bar, print_message, print_result
from knnstore.errors import ConfigError
from knnstore.model_names import check_model

if TYPE_CHECKING:
    from knnstore_research.key_probing import Probed


def probe_keys(
    model: Annotated[str, typer.Option(metavar="PATH_OR_HUB_ID", help="The causal language model to probe.")],
    *,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="PLACE",
            show_default="all places of the last two layers, and after the last layer",
            help="A place to compare; repeatable. See `knnstore init`.",
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", show_default="l2 and ip", help="A metric; repeatable."),
    ] = None,
    states: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="2 and 3",
            help="At the best place, also try keys of N hidden states; repeatable. 1 tries no further keys.",
        ),
    ] = None,
    dims: Annotated[
        list[int] | None,
        typer.Option(
            "--dim",
            min=1,
            metavar="N",
            help="Also project the best keys to N components (PCA); repeatable.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of tokens of the sample; a third of them is held out."),
    ] = 30_000,
    max_length: MaxLengthOption = None,
    documents: Documents,
    runtime: Runtime,
    as_json: JsonOption = False,
) -> None:
    """Compare places in a model where keys can be taken, and numbers of states in a key, on a sample of text.

    No store is needed or made. The command chooses documents at random. Two thirds of them are stored in
    memory, and the rest is held out. The model reads each document once, which gives the keys at all places.
    For each place, k, temperature and lambda are fitted on one half of the held-out documents and evaluated
    on the other half, both ways. The table shows held-out perplexities with 95 % intervals, the lowest first,
    and their ratio to the perplexity of the model alone.

    At the best place, keys of two and three states are tried too (see `knnstore init --states`). They are as
    wide as keys of one state. A message says the ratio of their perplexity to that of keys of one state.

    Examples:
      knnstore research probe-keys --model examples/tiny-lm articles.jsonl
      knnstore research probe-keys --model examples/tiny-lm articles.jsonl --key ffn_input --dim 8 --json
    """
    documents.check_files()
    check_model(model)
    silence_transformers()
    from knnstore.lm import load_model
    from knnstore_research.key_probing import probe_keys as probe

    with Bar() as bar:
        base, tokenizer = load_model(model, device=runtime.device, dtype=runtime.dtype)
        found = probe(
            base,
            tokenizer,
            documents.read_documents(bar),
            keys=keys or None,
            metrics=metrics or ["l2", "ip"],
            states=states or (2, 3),
            dims=dims or (),
            tokens=tokens,
            max_length=max_length,
            on_bad=documents.make_skip_function(bar),
            progress=bar,
        )
    rows = [_build_row(candidate) for candidate in found.candidates]
    result = {
        "stored": found.stored,
        "held_out": found.held_out,
        "documents": found.documents,
        "base": found.base._asdict(),
        "candidates": rows,
        "best": None if found.best is None else _build_row(found.best),
        **documents.left_out,
    }
    documents.report()
    print_result(result, format_fits_table(rows, ["key", "states", "metric", "dim"]), as_json=as_json)
    print_message(
        f"the model alone: {found.base.ppl:,.2f}; {found.held_out:,} held-out tokens, {found.stored:,} stored"
    )
    for joined in sorted(found.candidates, key=lambda candidate: candidate.states):
        if joined.change is not None:
            ratio, low, high = joined.change
            print_message(
                f"{joined.states} states: {ratio:.3f} times the perplexity of one ({low:.3f} to {high:.3f})"
            )
    if found.best is None:
        raise ConfigError(
            "no place beats the model alone beyond chance: give more text (--tokens), or other text"
        )
    print_message(
        f"best for this text: knnstore init --key {found.best.key} --states {found.best.states} --metric "
        f"{found.best.metric}; --key also accepts this module path: {found.best.location}"
    )


def _build_row(probed: "Probed") -> dict[str, Any]:
    """Return a kind of keys as a row of the table, and as an element of ``candidates`` in the JSON result."""
    fitted = probed.fitted
    return {
        "key": probed.key,
        "location": probed.location,
        "metric": probed.metric,
        "dim": probed.dim,
        "states": probed.states,
        "ratio_to_one_state": None if probed.change is None else probed.change._asdict(),
        **build_fit_row(fitted.settings, fitted.lam, fitted.held_out, fitted.change),
    }
