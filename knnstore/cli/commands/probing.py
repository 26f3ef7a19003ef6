"""The command that compares where keys can be taken."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.models import quiet_transformers
from knnstore.cli.options import DeviceOption, DtypeOption, FilesArgument, JsonOption, SkipBadOption
from knnstore.cli.output import Bar, note, one_line, print_json, print_table
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore.errors import InputError
    from knnstore.lm import Probe, Probed


def probe_keys(
    files: FilesArgument,
    model: Annotated[str, typer.Option(metavar="PATH_OR_HUB_ID", help="The causal language model to probe.")],
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="PLACE",
            show_default="those of the last two layers and behind them",
            help="A place to compare; repeatable. See `knnstore init`.",
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", show_default="l2 and ip", help="A metric; repeatable."),
    ] = None,
    dims: Annotated[
        list[int] | None,
        typer.Option(
            "--dim",
            min=1,
            metavar="N",
            help="Project the best keys to so many components (PCA) as well; repeatable.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of the sample, a third of them held out.")
    ] = 30_000,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, metavar="TOKENS", show_default="the model's limit", help="Length of a window."),
    ] = None,
    skip_bad: SkipBadOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare where keys can be taken in a model, on a sample of text.

    No store is needed or made. Documents chosen at random are divided: two thirds are stored in
    memory, the rest is searched for. The model reads each once, which gives the keys of all places;
    for each of them k, temperature and lambda are fitted on half of the held-out documents and judged
    on the other half, both ways. The table gives held-out perplexities with intervals of 95 %, the best
    first, and their quotient by that of the model alone.

    Examples:
      knnstore probe-keys --model examples/tiny-lm articles.jsonl
      knnstore probe-keys --model examples/tiny-lm articles.jsonl --key ffn_input --dim 8 --json
    """
    from knnstore.documents import read_documents
    from knnstore.lm import load_model
    from knnstore.lm import probe_keys as probe

    bad: list[InputError] = []

    def skip(error: "InputError") -> None:
        bad.append(error)
        note(f"skipped {one_line(error)}")

    quiet_transformers()
    with Bar() as bar:
        base, tokenizer = load_model(model, device=device, dtype=dtype)
        found = probe(
            base,
            tokenizer,
            read_documents(files, on_bad=skip if skip_bad else None),
            keys=keys or None,
            metrics=metrics or ["l2", "ip"],
            dims=dims or (),
            tokens=tokens,
            max_length=max_length,
            progress=bar,
        )
    rows = [_row(candidate) for candidate in found.candidates]
    if as_json:
        print_json(
            {
                "stored": found.stored,
                "held_out": found.held_out,
                "documents": found.documents,
                "base": found.base._asdict(),
                "candidates": rows,
                "best": None if found.best is None else _row(found.best),
                "skipped": len(bad),
            }
        )
    else:
        shown = [{**row, "quotient": f"{row['quotient']:.3f}"} for row in rows]
        columns = ["key", "metric", "dim", "k", "temperature", "lambda", "ppl", "low", "high", "quotient"]
        print_table(shown, columns)
    _advise(found)


def _advise(found: "Probe") -> None:
    note(
        f"the model alone: {found.base.ppl:,.2f}; {found.held_out:,} held-out tokens, {found.stored:,} stored"
    )
    if found.best is None:
        raise ConfigError("no place beats the model alone beyond chance: give more text (--tokens), or other")
    note(
        f"best here: knnstore init --key {found.best.key} --metric {found.best.metric}; a location, which "
        f"--key takes as well: {found.best.location}"
    )


def _row(probed: "Probed") -> dict[str, Any]:
    fitted = probed.fitted
    return {
        "key": probed.key,
        "location": probed.location,
        "metric": probed.metric,
        "dim": probed.dim,
        "k": fitted.settings.k,
        "temperature": fitted.settings.temperature,
        "lambda": fitted.lam,
        **fitted.held_out._asdict(),
        "quotient": fitted.change.ppl,
        "quotient_low": fitted.change.low,
        "quotient_high": fitted.change.high,
    }
