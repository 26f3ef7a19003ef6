"""Tables of fitted settings."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from knnstore.cli.output import table

if TYPE_CHECKING:
    from knnstore.lm import Interval, KNNSettings


def figures(
    settings: "KNNSettings | None", lam: float, held_out: "Interval", change: "Interval"
) -> dict[str, Any]:
    """Return one row of a table of fits.

    Args:
        settings: the fitted settings; None for the model alone.
        lam: average weight of retrieval.
        held_out: held-out perplexity and its interval.
        change: ratio of the perplexity to that of the model alone, and its interval.
    """
    ratios = {"ratio": change.ppl, "ratio_low": change.low, "ratio_high": change.high}
    reach = {
        "k": settings.k if settings else 0,
        "probes": settings.probes if settings else None,
        "temperature": settings.temperature if settings else None,
    }
    return {**reach, "lambda": lam, **held_out._asdict(), **ratios}


def table_of_fits(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Format rows of `figures` as a table.

    Args:
        rows: the rows, each with additional columns that name it.
        names: the names of these columns, which come first.
    """
    shown = [{**row, "T": row["temperature"], "ratio": f"{row['ratio']:.3f}"} for row in rows]
    reach = "probes" if any(row["probes"] for row in rows) else "k"
    return table(shown, [*names, reach, "T", "lambda", "ppl", "low", "high", "ratio"])
