"""Fitted settings as they are printed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from knnstore.cli.output import table

if TYPE_CHECKING:
    from knnstore.lm import Interval, KNNSettings


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
    shown = [{**row, "T": row["temperature"], "ratio": f"{row['ratio']:.3f}"} for row in rows]
    reach = "probes" if any(row["probes"] for row in rows) else "k"
    return table(shown, [*names, reach, "T", "lambda", "ppl", "low", "high", "ratio"])
