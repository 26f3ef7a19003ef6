"""The command that fits settings to a user's own text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.inputs import Documents
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import DomainsOption, JsonOption, LeaveOutOption
from knnstore.cli.output import Bar, echo, note, print_result, table
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore.lm import Comparison, Interval, KNNSettings


def calibrate(
    *,
    domains: DomainsOption = None,
    max_k: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Neighbors to search for; a quarter of them, and so on, is tried too. Above 1,024 "
            "a fixed lambda and bins are fitted, below all mixers. A store with cells tries 4 to 64 probes "
            "instead.",
        ),
    ] = 4096,
    leave_out: LeaveOutOption = False,
    networks: Annotated[
        bool,
        typer.Option(
            "--networks/--no-networks",
            help="Also fit a small network as one more mixer, and one that tells where searches can be left "
            "out.",
        ),
    ] = True,
    ngrams: Annotated[
        bool,
        typer.Option("--ngrams/--no-ngrams", help="Also try counts of the n-grams of the stored text."),
    ] = True,
    skip: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Save settings that leave out this share of the searches, as 0.5."
        ),
    ] = None,
    documents: Documents,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Fit k or probes, temperature, lambda and mixer to held-out text, and save the best.

    The model reads the documents once; then every candidate is fitted on half of the documents and judged
    on the other half, both ways (two-fold cross-fitting). Where there are 2 to 16 domains, each is searched
    on its own too, and weights of their own are a candidate. The table gives held-out perplexities with
    intervals of 95 % over documents, and their ratio to that of the model alone. What is best is
    saved for these domains (or the whole store) and used by eval, generate and explain from then on; nothing
    is saved unless it beats the model alone, and settings chosen before, beyond chance. The lowest of many is
    low by luck too: what is saved with it is what to expect, of each half by the best on the other half.

    A second table tells what it costs to leave out those searches that are expected to help least.

    Examples:
      knnstore calibrate dev.jsonl
      knnstore calibrate dev.jsonl --domain news --json
      knnstore calibrate dev.jsonl --skip 0.25
    """
    documents.check()
    with Bar() as bar, runtime.open_model("a", domains=domains) as lm:
        found = lm.calibrate(
            documents.read(bar),
            domains=domains,
            max_k=max_k,
            leave_out=leave_out,
            networks=networks,
            ngrams=ngrams,
            skip=skip,
            progress=bar,
        )
    if found.in_store and networks:
        note(
            f"{found.in_store:,} of the documents are in the store: no network was trained on them, since it "
            "would outlast their removal"
        )
    from knnstore.lm import settings_to_dict

    rows = _rows(found.comparison)
    savings = [
        {"saved": of.share, "ppl": of.ppl, "ratio": of.ratio, "random": of.random} for of in found.savings
    ]
    result = {
        "candidates": rows,
        "saved": None if found.record is None else asdict(found.record),
        "settings": None if found.settings is None else settings_to_dict(found.settings),
        "expected": found.comparison.expected._asdict(),
        "kept": found.kept,
        "savings": savings,
        "scoring_seconds": found.scoring_seconds,
        "fitting_seconds": found.fitting_seconds,
        **documents.left_out,
    }
    print_result(result, table_of_fits(rows, ["mixer"]), as_json=as_json)
    if savings and not as_json:
        note("leaving out the searches expected to help least, and its ratio when chosen at random:")
        shown = [
            {
                **row,
                "saved": f"{row['saved']:.0%}",
                "ratio": f"{row['ratio']:.3f}",
                "random": f"{row['random']:.3f}",
            }
            for row in savings
        ]
        echo(table(shown, ["saved", "ppl", "ratio", "random"]))
    if found.kept and found.comparison.current is not None:
        note(
            "the settings in force stay, perplexity "
            f"{found.comparison.current.held_out.ppl:,.2f}: no candidate beats them beyond chance"
        )
        return
    if found.record is None:
        raise ConfigError(
            f"no candidate beats the model alone (perplexity {found.comparison.base.ppl:,.2f}) beyond "
            "chance: nothing was saved. Store more text of this kind, or give more held-out documents"
        )
    if skip is not None and not found.record.skipped:
        note(f"warning: --skip has no effect, the best settings ({found.record.mixer}) make no search")
    if not as_json:
        where = ", ".join(found.record.domains) or "the whole store"
        note(
            f"saved for {where}: {found.record.mixer}, perplexity {found.record.base_ppl:,.2f} -> "
            f"{found.record.knn_ppl:,.2f} on {found.record.tokens:,} held-out tokens "
            f"({found.scoring_seconds:.0f} s scoring, {found.fitting_seconds:.0f} s fitting)"
        )


def _rows(comparison: "Comparison") -> list[dict[str, Any]]:
    """A row for the model alone, for the settings until now, and for each candidate."""
    from knnstore.lm import Interval

    alone = figures(None, 0.0, comparison.base, Interval(1.0, 1.0, 1.0))
    shown = [*([] if comparison.current is None else [comparison.current]), *comparison.candidates]
    return [{"mixer": "model alone", **alone}] + [
        {"mixer": one.name, **figures(one.settings, one.lam, one.held_out, one.change)} for one in shown
    ]


def figures(
    settings: "KNNSettings | None", lam: float, held_out: "Interval", change: "Interval"
) -> dict[str, Any]:
    """Fitted settings as they are printed, with perplexity and its ratio to that of the model alone."""
    ratios = {"ratio": change.ppl, "ratio_low": change.low, "ratio_high": change.high}
    reach = {
        "k": settings.k if settings else 0,
        "probes": settings.probes if settings else None,
        "temperature": settings.temperature if settings else None,
    }
    return {**reach, "lambda": lam, **held_out._asdict(), **ratios}


def table_of_fits(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Write rows of `figures`, each after what it is named by."""
    shown = [{**row, "ratio": f"{row['ratio']:.3f}"} for row in rows]
    reach = "probes" if any(row["probes"] for row in rows) else "k"
    return table(shown, [*names, reach, "temperature", "lambda", "ppl", "low", "high", "ratio"])
