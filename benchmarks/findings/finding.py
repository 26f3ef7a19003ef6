"""What an experiment returns, and the rules by which domains together give a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from knnstore.lm import Interval

Verdict = Literal["reproduced", "not reproduced", "inconclusive"]
Cell = Any
"""A string, a number, None, or an `Interval`."""


@dataclass(frozen=True)
class Table:
    """Rows under a heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""


@dataclass(frozen=True)
class Plot:
    """Lines through points (x, y)."""

    name: str
    """Of its file, distinct among all plots."""
    title: str
    x: str
    y: str
    lines: dict[str, Sequence[tuple[float, float]]]
    log_x: bool = False


@dataclass(frozen=True)
class Finding:
    """What an experiment found."""

    verdict: Verdict
    summary: str
    """What was seen, in a sentence or two."""
    tables: Sequence[Table]
    plots: Sequence[Plot] = field(default=())


def settle(holds: Sequence[bool | None]) -> Verdict:
    """Join the domains: reproduced in three of four, not reproduced with the contrary in half of them.

    Args:
        holds: for each domain whether it holds, does not hold, or is not to be told (None).
    """
    if holds and 4 * sum(held is True for held in holds) >= 3 * len(holds):
        return "reproduced"
    if 2 * sum(held is False for held in holds) >= len(holds) > 0:
        return "not reproduced"
    return "inconclusive"


def below(interval: Interval, bound: float = 1.0) -> bool | None:
    """Whether all of an interval is below a bound; None when the bound is inside."""
    if interval.high < bound:
        return True
    return False if interval.low > bound else None


def every(holds: Sequence[bool | None]) -> bool | None:
    """Whether several things hold together: False if one does not, else None if one is not to be told."""
    return False if False in holds else None if None in holds else True


def count(holds: Sequence[bool | None]) -> str:
    """``3 of 4 domains``."""
    return f"{sum(held is True for held in holds)} of {len(holds)} domain{'s' * (len(holds) != 1)}"


def each(ratios: Sequence[Interval]) -> str:
    """Return the values of all domains as text: ``0.95, 0.85``."""
    return ", ".join(f"{one.ppl:.2f}" for one in ratios)
