"""Which points are meant, in the terms that Qdrant filters by."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from knnstore.datastore import Filter, IdRanges, Ids, positions_of, ranges_of, whole_positions

GROUP = "group"
"""The payload field with a record's group, an integer."""

POSITION = "position"
"""The payload field with a record's position, an integer.

Qdrant has no ranges of ids, and its ranges of a field are floats. A record id begins with its position, so
ranges of ids are ranges of positions, whose 43 bits a float holds exactly.
"""

_LISTED_IDS = 10_000  # so many single ids are named in a condition rather than looked up


@dataclass(frozen=True, slots=True)
class Condition:
    """A set of points: all of some groups, or those in half-open ranges of positions or with some ids."""

    groups: tuple[int, ...] = ()
    positions: tuple[tuple[int, int], ...] = ()
    ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.groups or self.positions or self.ids)


def condition_of_filter(where: Filter, read_ids: Callable[[Condition], Ids]) -> Condition:
    """Name a filter's records: by their groups where it has them, for these are indexed for searching.

    `read_ids` gives the ids of all points that a condition is true of.
    """
    if where.groups is not None:
        return Condition(groups=tuple(sorted(where.groups)))
    return condition_of_ranges(where.ids, read_ids)


def condition_of_ranges(ranges: IdRanges, read_ids: Callable[[Condition], Ids]) -> Condition:
    """Name ranges of ids by ranges of positions.

    Ranges that end within a position, which knnstore itself never makes, need the ids there: they are
    listed if they are few, else those that exist are looked up.
    """
    whole = whole_positions(ranges)
    rest = ranges - ranges_of(whole.starts, whole.stops)
    positions = tuple(whole)
    if rest.size <= _LISTED_IDS:
        return Condition(positions=positions, ids=tuple(rest.ids().tolist()))
    around = IdRanges(np.stack([positions_of(rest.starts), positions_of(rest.stops - 1) + 1], axis=1))
    found = read_ids(Condition(positions=tuple(around)))
    return Condition(positions=positions, ids=tuple(found[rest.contains(found)].tolist()))
