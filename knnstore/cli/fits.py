"""Tables of fitted settings."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from knnstore.cli.output import format_table

if TYPE_CHECKING:
    from knnstore.lm import Interval, KNNSettings


def build_fit_row(
    settings: "KNNSettings | None", lam: float, held_out: "Interval", change: "Interval"
) -> dict[str, Any]:
    """Return one row for `format_fits_table`, as a dict with a value for each column.

    Args:
        settings: fitted settings, whose k, number of searched cells and temperature are shown; None for the
            model alone. No temperature is shown if a network chooses it.
        lam: average weight of retrieval.
        held_out: held-out perplexity and its interval.
        change: ratio of the held-out perplexity to the perplexity of the model alone, and its interval.
    """
    ratios = {"ratio": change.ppl, "ratio_low": change.low, "ratio_high": change.high}
    search_settings = {
        "k": settings.k if settings else 0,
        "probes": settings.probes if settings else None,
        "temperature": settings.temperature if settings and not settings.chooses_temperature else None,
    }
    return {**search_settings, "lambda": lam, **held_out._asdict(), **ratios}


def format_fits_table(rows: Sequence[Mapping[str, Any]], first_columns: Sequence[str]) -> str:
    """Format rows of `build_fit_row` as a table.

    Args:
        rows: results of `build_fit_row`, to which the caller has added the values of `first_columns`.
        first_columns: names of the columns that identify a row, such as "mixer". They come first in the
            table.
    """
    formatted = [{**row, "T": row["temperature"], "ratio": f"{row['ratio']:.3f}"} for row in rows]
    reach_column = "probes" if any(row["probes"] for row in rows) else "k"
    columns = [*first_columns, reach_column, "T", "lambda", "ppl", "low", "high", "ratio"]
    return format_table(formatted, columns)
