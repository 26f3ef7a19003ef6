"""Reading several segments in order of ids, and writing them as one segment.

The module also plans which segments to merge, adds segments in memory, and marks rows dead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Groups, Ids, Keys
from knnstore.datastore.embedded.codecs import CodecFile
from knnstore.datastore.embedded.manifest import SegmentEntry
from knnstore.datastore.embedded.packed_ids import IdsPacker, is_worth_packing
from knnstore.datastore.embedded.segment import MappedColumns, Segment, StoredKeys
from knnstore.datastore.ranges import IdRanges
from knnstore.datastore.records import ID_LIMIT
from knnstore.durable import FileWriter, StoredFile, sync_directory
from knnstore.errors import CorruptDatastoreError
from knnstore.space import check_space

CHUNK_SIZE = 4 << 20
"""Bytes of keys that a merge holds in memory at a time."""

_LEAST_SHARE = 64  # rows of a segment that are taken together, however many segments there are
_FLOAT16_MAX = 65504.0
_LARGEST = 1 << 24  # rows; larger segments are not made by merging


def merge_records(
    segments: Sequence[Segment],
    *,
    ids: IdRanges | None = None,
    batch_size: int,
    codec: CodecFile | None = None,
) -> Iterator[tuple[Ids, StoredKeys, Groups]]:
    """Yield the live records of several segments by ascending id, in batches of at most `batch_size`.

    An id is live in at most one segment. Memory holds one batch, and some ids of each segment whose id range
    overlaps with others.

    Args:
        segments: the segments to read.
        ids: yields only records in these ranges; None yields all.
        batch_size: number of records of a batch; the last may have fewer.
        codec: codec whose codes are yielded in place of keys; None yields keys.

    Raises:
        CorruptDatastoreError: a segment is damaged; raised when its records are reached.
    """
    rest = _Rows.empty()
    for chunk in _iterate_rows(segments, ids, batch_size):
        rows = _Rows.joined([rest, chunk])
        complete = len(rows.ids) // batch_size * batch_size
        for start in range(0, complete, batch_size):
            yield _read_records(segments, rows.part(slice(start, start + batch_size)), codec)
        rest = rows.part(slice(complete, None))
    if len(rest.ids):
        yield _read_records(segments, rest, codec)


class _Rows(NamedTuple):
    """Rows of several segments, sorted by id: three arrays of shape (n,)."""

    ids: Ids
    owners: NDArray[np.int64]
    """Index of each row's segment."""
    numbers: NDArray[np.int64]
    """Number of each row in its segment."""

    @classmethod
    def empty(cls) -> Self:
        """Return no rows."""
        return cls(*np.empty((3, 0), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate one or more parts, without sorting."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def part(self, selection: slice | NDArray[np.int64]) -> Self:
        """Return the rows that a slice or an array of indices selects."""
        return type(self)(*(array[selection] for array in self))


def _iterate_rows(segments: Sequence[Segment], ids: IdRanges | None, batch_size: int) -> Iterator[_Rows]:
    """Yield the live rows of several segments by ascending id, in pieces of different lengths.

    A segment is not read before the ids reach its first id.

    Args:
        segments: the segments, whose live ids differ.
        ids: ids to which the result is restricted; None yields all rows.
        batch_size: approximate number of rows of a piece.
    """
    unopened = sorted(range(len(segments)), key=lambda owner: segments[owner].first_id, reverse=True)
    cursors: list[_Cursor] = []
    while cursors or unopened:
        bound = min((cursor.id_after(batch_size) for cursor in cursors), default=ID_LIMIT)
        while unopened and segments[unopened[-1]].first_id <= bound:
            owner = unopened.pop()
            cursor = _Cursor(owner, segments[owner], segments[owner].live_rows(ids))
            if cursor.advance():
                cursors.append(cursor)
                bound = min(bound, cursor.id_after(batch_size))
        # All rows up to the least id at which a segment's share ends are known now.
        sharing = [cursor for cursor in cursors if cursor.next_id <= bound]
        share = max(_LEAST_SHARE, batch_size // max(1, len(sharing)))
        bound = min([bound, *(cursor.id_after(share) for cursor in sharing)])
        row_parts = [_take_rows(cursor, bound) for cursor in sharing if cursor.next_id <= bound]
        cursors = [cursor for cursor in cursors if cursor.advance()]
        if len(row_parts) > 1:
            rows = _Rows.joined(row_parts)
            yield rows.part(np.argsort(rows.ids))
        else:
            yield from row_parts


def _take_rows(cursor: "_Cursor", bound: int) -> _Rows:
    """Return the next selected rows of a segment with ids <= `bound`, and move its cursor behind them."""
    numbers = cursor.take(bound)
    return _Rows(cursor.ids[numbers], np.full(len(numbers), cursor.owner), numbers)


def _read_records(
    segments: Sequence[Segment], rows: _Rows, codec: CodecFile | None
) -> tuple[Ids, StoredKeys, Groups]:
    """Read the records of some rows, one segment after the other.

    Args:
        segments: the segments.
        rows: rows to read, at least one.
        codec: codec whose codes are returned in place of keys; None returns keys.

    Returns:
        ids, keys or codes, and groups, in the order of `rows`.
    """
    order = np.argsort(rows.owners, kind="stable")
    owners, starts = np.unique(rows.owners[order], return_index=True)
    pieces = [
        (segments[owner], positions)
        for owner, positions in zip(owners.tolist(), np.split(order, starts[1:]), strict=True)
    ]
    parts = [
        segment.columns.codes_at(rows.numbers[positions], codec)
        if codec
        else segment.columns.keys_at(rows.numbers[positions])
        for segment, positions in pieces
    ]
    keys = np.empty((len(order), parts[0].shape[1]), np.result_type(*parts))
    groups = np.empty(len(order), np.int32)
    for (segment, positions), part in zip(pieces, parts, strict=True):
        keys[positions], groups[positions] = part, segment.group
    return rows.ids, keys, groups


class _Cursor:
    """A position among the selected rows of a segment, which are read by ascending id.

    Rows that are not selected cost nothing.

    Args:
        owner: index of the segment.
        segment: the segment.
        rows: ranges of the selected row numbers.
    """

    def __init__(self, owner: int, segment: Segment, rows: IdRanges) -> None:
        self.owner = owner
        self.ids = segment.columns.ids if rows else np.empty(0, np.int64)
        self._rows = rows
        # Number of wanted rows before each range, then of all ranges.
        self._before = np.append(0, np.cumsum(rows.stops - rows.starts))
        self._done = 0
        self.next_id = -1

    def advance(self) -> bool:
        """Set `next_id` to the id of the next selected row. Returns False, and sets nothing, at the end.

        The position stays the same; `take` moves it.
        """
        if self._done == self._before[-1]:
            return False
        self.next_id = self._read_id(self._done)
        return True

    def id_after(self, rows: int) -> int:
        """Return the id of the last of the next `rows` selected rows, or of the last selected row."""
        return self._read_id(min(self._done + rows, int(self._before[-1])) - 1)

    def take(self, bound: int) -> NDArray[np.int64]:
        """Return the numbers of the next selected rows with ids <= `bound`, and move behind these rows."""
        row = int(np.searchsorted(self.ids, bound, side="right"))
        range_index = int(np.searchsorted(self._rows.starts, row, side="right")) - 1
        stop = int(
            self._before[range_index]
            + min(row, self._rows.stops[range_index])
            - self._rows.starts[range_index]
        )
        numbers = self._to_row_numbers(np.arange(self._done, stop))
        self._done = stop
        return numbers

    def _to_row_numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert indices into the selected rows, of which 0 is the first, to row numbers of the segment."""
        range_indices = np.searchsorted(self._before, indices, side="right") - 1
        numbers: NDArray[np.int64] = self._rows.starts[range_indices] + indices - self._before[range_indices]
        return numbers

    def _read_id(self, index: int) -> int:
        return int(self.ids[self._to_row_numbers(np.array([index]))[0]])


def plan_merges(segments: Sequence[Segment], ratio: int) -> list[list[Segment]]:
    """Choose runs of neighboring segments to merge, so that each has `ratio` times the rows of the next.

    This is the logarithmic method (Bentley and Saxe, 1980): the number of segments, and the number of times
    that a row is rewritten, grow with the logarithm of the number of rows. No run has more than 2^24 live
    rows, so larger segments stay.

    Args:
        segments: segments of one group, in the order in which they were created.
        ratio: smallest ratio of the numbers of live rows of a segment and the next segment.

    Returns:
        Runs of two or more successive segments; each run should become one segment. Empty if no segments need
        to be merged.
    """
    stack: list[list[Segment]] = []
    for segment in segments:
        stack.append([segment])
        while len(stack) > 1:
            previous, last = (sum(run_segment.live for run_segment in run) for run in stack[-2:])
            # A run that is rewritten anyway takes all of its neighbors.
            is_final = len(stack[-2]) == 1 and previous >= ratio * last
            if is_final or previous + last > _LARGEST:
                break
            stack[-2:] = [stack[-2] + stack[-1]]
    return [run for run in stack if len(run) > 1]


def write_segment(
    root: Path,
    name: str,
    segments: Sequence[Segment],
    dim: int,
    damaged_segments: dict[StoredFile, int],
    codec: CodecFile | None = None,
) -> Segment:
    """Write the live rows of one or more segments of a group as the files of a new segment, durably.

    Args:
        root: the datastore's directory.
        name: unused number that names the files.
        segments: segments to read, with at least one live row.
        dim: number of components of a key.
        damaged_segments: damaged segments of the datastore; see `MappedColumns`.
        codec: codec by which keys are coded; None stores the keys themselves.

    Returns:
        The new segment, which no manifest names yet.

    Raises:
        DiskFullError: the disk has too little free space; nothing was written.
        OSError: the disk became full or failed.
        CorruptDatastoreError: a segment is damaged; no manifest names the new files.
    """
    group, rows = segments[0].group, sum(segment.live for segment in segments)
    dtype = np.dtype(np.uint8) if codec else _common_dtype(segments)
    packer = IdsPacker() if is_worth_packing(_iterate_live_ids(segments)) else None
    runs: int | None = None
    check_space(root, estimate_size(segments, dim), f"writing {rows:,} records")
    keys_name, ids_name, digests_name = file_names(name)
    first = last = -1
    with (
        FileWriter(root, keys_name) as keys_file,
        FileWriter(root, ids_name) as ids_file,
        FileWriter(root, digests_name) as digests_file,
    ):
        batch_size = max(1, CHUNK_SIZE // (dim * _common_dtype(segments).itemsize))
        for ids, keys, _ in merge_records(segments, batch_size=batch_size, codec=codec):
            keys_file.write(keys.astype(dtype, copy=False))
            ids_file.write(packer.add_ids(ids) if packer else ids)
            first, last = int(ids[0]) if first < 0 else first, int(ids[-1])
        if packer:
            runs = packer.finish(ids_file.write)
        stored, stored_ids = keys_file.finish(), ids_file.finish()
        digests_file.write(keys_file.digests)
        digests_file.finish()
    sync_directory(root / "segments")
    entry = SegmentEntry(
        name,
        group,
        rows,
        dtype.name,
        first,
        last,
        stored,
        stored_ids,
        digests_name,
        codes=codec.entry if codec else None,
        runs=runs,
    )
    columns = MappedColumns(root, entry, dim, damaged_segments, trusted=True, codec_file=codec)
    if columns.problem is not None:
        raise CorruptDatastoreError(columns.problem)
    return Segment(group, rows, first, last, columns, entry=entry)


def _iterate_live_ids(segments: Sequence[Segment]) -> Iterator[Ids]:
    """Yield the ids of the live rows of each segment, int64, ascending within a segment."""
    for segment in segments:
        ids = segment.columns.ids
        yield ids[segment.live_rows().ids()] if segment.dead else ids


def estimate_size(segments: Sequence[Segment], dim: int) -> int:
    """Return the bytes that the live rows of segments would take on disk as one segment of uncoded keys."""
    return sum(segment.live for segment in segments) * (dim * _common_dtype(segments).itemsize + 8)


def _common_dtype(segments: Sequence[Segment]) -> np.dtype[Any]:
    """Return the smallest dtype that holds the keys of all segments."""
    return np.result_type(*(segment.columns.dtype for segment in segments))


def file_names(name: str) -> tuple[str, str, str]:
    """Return the paths of a segment's files of keys, ids and digests, relative to the datastore."""
    return f"segments/{name}.keys", f"segments/{name}.ids", f"segments/{name}.digests"


def stored_keys(keys: Keys) -> StoredKeys:
    """Convert keys, shape (n, dim), n >= 1, to half precision; unchanged if a component exceeds its range."""
    return keys if max(keys.max(), -keys.min()) > _FLOAT16_MAX else keys.astype(np.float16)


def add_buffered(segments: Sequence[Segment], new_segment: Segment) -> list[Segment]:
    """Return a list of segments with one more segment in memory.

    The new segment is merged with earlier segments in memory that are not larger. So the number of segments
    in memory, and the number of times that a row is copied, grow with the logarithm of the number of rows.

    Args:
        segments: segments of the group; not changed.
        new_segment: new segment in memory, of the same group.
    """
    remaining = list(segments)
    while True:
        buffered = [
            segment for segment in remaining if segment.group == new_segment.group and segment.entry is None
        ]
        if not buffered or buffered[-1].rows > new_segment.rows:
            return [*remaining, new_segment]
        last = buffered[-1]
        remaining.remove(last)
        live_rows = last.live_rows().ids()
        ids = np.concatenate([last.columns.ids[live_rows], new_segment.columns.ids])
        keys = np.concatenate([last.columns.keys[live_rows], new_segment.columns.keys])
        if len(live_rows) and last.last_id > new_segment.first_id:
            order = np.argsort(ids)
            ids, keys = ids[order], keys[order]
        new_segment = Segment.in_memory(new_segment.group, ids, keys)


def mark_rows_dead(
    groups: Mapping[int, Sequence[Segment]],
    group_numbers: Iterable[int],
    first: int,
    last: int,
    rows_in: Callable[[Segment], IdRanges],
) -> dict[int, list[Segment]]:
    """Mark rows dead. Returns all segments of each group that changes; the arguments are not changed.

    Args:
        groups: the segments of each group.
        group_numbers: numbers of the groups in which rows may be marked.
        first: smallest id of the rows to mark.
        last: largest id of the rows to mark; segments without ids in this range are skipped.
        rows_in: returns the rows of a segment to mark.
    """
    changed: dict[int, list[Segment]] = {}
    for group in group_numbers:
        for segment in groups[group]:
            if segment.first_id <= last and segment.last_id >= first:
                rows = rows_in(segment) - segment.dead
                if rows:
                    group_segments = changed.setdefault(group, list(groups[group]))
                    group_segments[group_segments.index(segment)] = segment.without(rows)
    return changed
