"""Sets of record ids as sorted, disjoint, half-open ranges."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray


class IdRanges:
    """An immutable set of int64 ids, stored as sorted, disjoint, half-open ranges.

    Ranges that overlap or touch are merged, and empty ranges are dropped. So two sets with the same ids
    always have the same ranges. All operations cost O(number of ranges) except `ids`, which costs O(number of
    ids).

    Args:
        ranges: pairs (start, stop) in any order, or an integer array of shape (m, 2); `stop` is not in the
            range. Without pairs, the set is empty.

    Raises:
        ValueError: a start is negative or greater than its stop.

    Example:
        >>> IdRanges([(10, 20), (0, 5), (5, 7)])
        IdRanges([(0, 7), (10, 20)])
    """

    __slots__ = ("starts", "stops")

    starts: NDArray[np.int64]
    """First id of each range, shape (m,), ascending."""

    stops: NDArray[np.int64]
    """The last id of each range plus one, shape (m,), ascending."""

    def __init__(self, ranges: Iterable[tuple[int, int]] | ArrayLike = ()) -> None:
        pairs = np.asarray(ranges if isinstance(ranges, np.ndarray) else list(ranges), np.int64)  # type: ignore[arg-type]
        pairs = pairs.reshape(-1, 2)
        if (pairs[:, 0] < 0).any() or (pairs[:, 0] > pairs[:, 1]).any():
            raise ValueError("a range needs 0 <= start <= stop")
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        furthest_stops = np.maximum.accumulate(pairs[:, 1])
        is_first, is_last = np.ones((2, len(pairs)), bool)
        is_first[1:] = is_last[:-1] = pairs[1:, 0] > furthest_stops[:-1]
        self.starts, self.stops = pairs[is_first, 0], furthest_stops[is_last]
        self.starts.setflags(write=False)
        self.stops.setflags(write=False)

    @classmethod
    def from_ids(cls, ids: NDArray[np.int64]) -> "IdRanges":
        """Return the set that contains exactly the ids of an array.

        Args:
            ids: int64, shape (n,), each >= 0, in any order; duplicates are allowed.
        """
        return cls(np.stack([ids, ids + 1], axis=1))

    def __len__(self) -> int:
        """Return the number of ranges, not of ids."""
        return len(self.starts)

    @property
    def size(self) -> int:
        """Number of ids in the set."""
        return int((self.stops - self.starts).sum())

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts.tolist(), self.stops.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IdRanges):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.stops, other.stops)

    def __hash__(self) -> int:
        return hash((self.starts.tobytes(), self.stops.tobytes()))

    def __repr__(self) -> str:
        return f"IdRanges({list(self)})"

    def ids(self) -> NDArray[np.int64]:
        """Return every id of the set, int64, ascending, shape (size,).

        The array takes 8 bytes for each id, so call this method only for small sets.
        """
        lengths = self.stops - self.starts
        shifts: NDArray[np.int64] = np.repeat(self.stops - np.cumsum(lengths), lengths)
        return np.arange(len(shifts)) + shifts

    def contains(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask with the shape of `ids`: True where an id is in the set.

        Negative ids are never in the set.
        """
        if not self:
            return np.zeros(ids.shape, bool)
        if len(self) == 1:  # the common case; several times cheaper than a binary search
            inside: NDArray[np.bool_] = (ids >= self.starts[0]) & (ids < self.stops[0])
            return inside
        indices = np.searchsorted(self.starts, ids, side="right") - 1
        return (indices >= 0) & (ids < self.stops[np.maximum(indices, 0)])

    def __or__(self, other: "IdRanges") -> "IdRanges":
        return IdRanges(np.concatenate([self._to_array(), other._to_array()]))

    def __and__(self, other: "IdRanges") -> "IdRanges":
        return self - (self - other)

    def __sub__(self, other: "IdRanges") -> "IdRanges":
        """Return the set of all ids that are in this set and not in `other`."""
        if not self or not other:
            return self
        low, high = int(min(self.starts[0], other.starts[0])), int(max(self.stops[-1], other.stops[-1]))
        gaps = np.stack([np.append(low, other.stops), np.append(other.starts, high)], axis=1)
        gaps = gaps[gaps[:, 0] < gaps[:, 1]]
        # Each range of this set overlaps a run of consecutive gaps of the other; cut it at the borders of the
        # gaps.
        first = np.searchsorted(gaps[:, 1], self.starts, side="right")
        last = np.searchsorted(gaps[:, 0], self.stops, side="left")
        counts = np.maximum(last - first, 0)
        own_indices = np.repeat(np.arange(len(self)), counts)
        gap_indices = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        starts = np.maximum(self.starts[own_indices], gaps[gap_indices, 0])
        stops = np.minimum(self.stops[own_indices], gaps[gap_indices, 1])
        return IdRanges(np.stack([starts, stops], axis=1))

    def find_slices(self, sorted_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find where the ids of the set stand in an ascending array of ids.

        Args:
            sorted_ids: int64, shape (n,), ascending.

        Returns:
            Slices [start, stop) of array indices, int64, shape (s, 2), ascending and disjoint. The slices
            together contain all array elements that are in the set, and no other elements. No slice is empty;
            s is 0 if no array element is in the set.
        """
        if not len(sorted_ids):
            return np.empty((0, 2), np.int64)
        # A store with many documents has many ranges, most of them outside these ids: skip those first.
        first = np.searchsorted(self.stops, sorted_ids[0], side="right")
        last = np.searchsorted(self.starts, sorted_ids[-1], side="right")
        slices = np.searchsorted(sorted_ids, self._to_array(slice(first, last)))
        return slices[slices[:, 0] < slices[:, 1]]

    def _to_array(self, selected: slice = slice(None)) -> NDArray[np.int64]:
        """Return the ranges as an array of pairs (start, stop), int64, shape (m, 2).

        Args:
            selected: slice of the list of ranges to return; by default all ranges.
        """
        return np.stack([self.starts[selected], self.stops[selected]], axis=1)
