"""Reading the records of several segments in order of their ids, and writing them as one segment.

A segment is an immutable set of records of one group, on disk or in memory. Row i of a segment is its i-th
record; a row is *dead* if the record was deleted or replaced, else *live*. The module also plans which
segments to merge, adds segments in memory, and marks rows as dead.
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
    """Yield the live records of several segments by ascending id, as batches (ids, keys, groups).

    A segment is an immutable set of records. A record is live if it is neither deleted nor replaced. Only one
    batch of keys is in memory at a time.

    Args:
        segments: the segments to read. They must not contain two live records with the same id.
        ids: ids of the records to yield; None yields all live records.
        batch_size: number of records of a batch; the last batch may have fewer records.
        codec: compressor of keys. If it is given, codes (compressed keys) are yielded in place of keys. None
            yields keys.

    Yields:
        Record ids, int64, shape (n,); keys, float16 or float32, shape (n, dim), or codes, uint8, shape
        (n, size); and group numbers, int32, shape (n,).

    Raises:
        CorruptDatastoreError: a segment is damaged; raised when its records are reached.
    """
    rest = _Rows.empty()
    for chunk in _iterate_rows(segments, ids, batch_size):
        rows = _Rows.concatenate([rest, chunk])
        complete = len(rows.ids) // batch_size * batch_size
        for start in range(0, complete, batch_size):
            yield _read_records(segments, rows.select(slice(start, start + batch_size)), codec)
        rest = rows.select(slice(complete, None))
    if len(rest.ids):
        yield _read_records(segments, rest, codec)


class _Rows(NamedTuple):
    """References to n records in several segments: three arrays of shape (n,), sorted by record id.

    A segment is an immutable set of records; row i is its i-th record.
    """

    ids: Ids
    """Record ids."""
    owners: NDArray[np.int64]
    """Index of each record's segment in the caller's list of segments."""
    numbers: NDArray[np.int64]
    """Row number of each record in its segment."""

    @classmethod
    def empty(cls) -> Self:
        """Return references to no records: three arrays of length 0."""
        return cls(*np.empty((3, 0), np.int64))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return one object with the references of one or more objects, in the given order, not sorted."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def select(self, selection: slice | NDArray[np.int64]) -> Self:
        """Return an object with some of the references.

        Args:
            selection: slice, or array of indices, that selects the references.
        """
        return type(self)(*(array[selection] for array in self))


def _iterate_rows(segments: Sequence[Segment], ids: IdRanges | None, batch_size: int) -> Iterator[_Rows]:
    """Yield references to the live records of several segments by ascending id, in chunks of varying length.

    Live records are neither deleted nor replaced. A segment is not read before the ids reach its first id.

    Args:
        segments: immutable sets of records. They must not contain two live records with the same id.
        ids: ids of the records to yield; None yields all live records.
        batch_size: approximate number of records in a chunk.
    """
    unopened = sorted(range(len(segments)), key=lambda owner: segments[owner].first_id, reverse=True)
    cursors: list[_Cursor] = []
    while cursors or unopened:
        bound = min((cursor.peek_id_after(batch_size) for cursor in cursors), default=ID_LIMIT)
        while unopened and segments[unopened[-1]].first_id <= bound:
            owner = unopened.pop()
            cursor = _Cursor(owner, segments[owner], segments[owner].live_rows(ids))
            if cursor.advance():
                cursors.append(cursor)
                bound = min(bound, cursor.peek_id_after(batch_size))
        # All rows up to the least id at which a segment's share ends are known now.
        sharing = [cursor for cursor in cursors if cursor.next_id <= bound]
        share = max(_LEAST_SHARE, batch_size // max(1, len(sharing)))
        bound = min([bound, *(cursor.peek_id_after(share) for cursor in sharing)])
        row_parts = [_take_rows(cursor, bound) for cursor in sharing if cursor.next_id <= bound]
        cursors = [cursor for cursor in cursors if cursor.advance()]
        if len(row_parts) > 1:
            rows = _Rows.concatenate(row_parts)
            yield rows.select(np.argsort(rows.ids))
        else:
            yield from row_parts


def _take_rows(cursor: "_Cursor", bound: int) -> _Rows:
    """Return references to the next records of a segment whose ids are at most `bound`.

    A segment is an immutable set of records. The cursor moves behind the returned records.

    Args:
        cursor: place in the sequence of the selected records of the segment.
        bound: largest record id to return.
    """
    numbers = cursor.take(bound)
    return _Rows(cursor.ids[numbers], np.full(len(numbers), cursor.owner), numbers)


def _read_records(
    segments: Sequence[Segment], rows: _Rows, codec: CodecFile | None
) -> tuple[Ids, StoredKeys, Groups]:
    """Read the keys of records in several segments, one segment after the other.

    Args:
        segments: immutable sets of records.
        rows: references to the records to read, at least one.
        codec: compressor of keys. If it is given, codes (compressed keys) are returned in place of keys. None
            returns keys.

    Returns:
        Record ids, int64, shape (n,); keys, shape (n, dim), or codes, uint8, shape (n, size); and group
        numbers, int32, shape (n,); all in the order of `rows`.
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
    """A place in the sequence of the selected records of one segment, by ascending id.

    A segment is an immutable set of records. The cursor starts before the first selected record. Records that
    are not selected cost no time.

    Args:
        owner: index of the segment in the caller's list of segments.
        segment: the segment.
        rows: row numbers of the selected records in the segment, as ranges.
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
        """Look at the next selected record without moving, and return whether there is one.

        If there is a next record, its id becomes the attribute `next_id`, and the result is True. If all
        selected records were taken, the result is False. Only `take` moves the cursor.
        """
        if self._done == self._before[-1]:
            return False
        self.next_id = self._read_id(self._done)
        return True

    def peek_id_after(self, rows: int) -> int:
        """Return the record id up to which `take` would return the next `rows` selected records.

        If fewer selected records are left, the result is the id of the last selected record. The cursor does
        not move.

        Args:
            rows: number of records, >= 1.
        """
        return self._read_id(min(self._done + rows, int(self._before[-1])) - 1)

    def take(self, bound: int) -> NDArray[np.int64]:
        """Return the row numbers of the next selected records with ids <= `bound`, and move behind them.

        Args:
            bound: largest record id, at least `next_id`.

        Returns:
            Numbers of the records in the segment, int64, shape (n,), ascending.
        """
        row = int(np.searchsorted(self.ids, bound, side="right"))
        range_index = int(np.searchsorted(self._rows.starts, row, side="right")) - 1
        stop = int(
            self._before[range_index]
            + min(row, self._rows.stops[range_index])
            - self._rows.starts[range_index]
        )
        numbers = self._to_segment_rows(np.arange(self._done, stop))
        self._done = stop
        return numbers

    def _to_segment_rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert indices into the sequence of selected records to row numbers of the segment.

        Args:
            indices: 0 for the first selected record, 1 for the second, and so on.
        """
        range_indices = np.searchsorted(self._before, indices, side="right") - 1
        numbers: NDArray[np.int64] = self._rows.starts[range_indices] + indices - self._before[range_indices]
        return numbers

    def _read_id(self, index: int) -> int:
        """Return the record id of one of the selected records.

        Args:
            index: 0 for the first selected record, 1 for the second, and so on.
        """
        return int(self.ids[self._to_segment_rows(np.array([index]))[0]])


def plan_merges(segments: Sequence[Segment], ratio: int) -> list[list[Segment]]:
    """Choose which successive segments of a group to merge. Nothing is merged yet.

    A record is live if it is neither deleted nor replaced. After the merges, each segment has at least
    `ratio` times the live records of the next segment. There is one exception: segments are not merged if
    they have more than 2^24 live records together. This is the logarithmic method (Bentley and Saxe, 1980):
    the number of segments, and the number of times that a record is rewritten, grow with the logarithm of the
    number of records.

    Args:
        segments: segments (immutable sets of records) of one group, in the order in which they were created.
        ratio: smallest ratio of the numbers of live records of a segment and the next segment.

    Returns:
        Lists of two or more successive segments. The segments of each list should be merged into one segment.
        The result is empty if no segments need to be merged.
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
    """Write the live records of one or more segments of a group to the files of a new segment, durably.

    A segment is a set of immutable files with records of one group. A record is live if it is neither deleted
    nor replaced.

    Args:
        root: the datastore's directory.
        name: unused number of at least 8 digits, from which the file names are made.
        segments: segments to read; together they have at least one live record.
        dim: number of components of a key.
        damaged_segments: group number of each damaged segment of the datastore, by the file of its keys. A
            segment that turns out to be damaged is added.
        codec: codec that compresses the keys to codes; None stores the keys themselves.

    Returns:
        The new segment. The manifest (the list of all files in use) does not list the new files yet.

    Raises:
        DiskFullError: the disk has too little free space; nothing was written.
        OSError: the disk became full or failed.
        CorruptDatastoreError: a segment is damaged. The files that were written so far are not in use.
    """
    # 1) Choose the formats of keys and ids, and check the space.
    group, rows = segments[0].group, sum(segment.live for segment in segments)
    dtype = np.dtype(np.uint8) if codec else _find_common_dtype(segments)
    packer = IdsPacker() if is_worth_packing(_iterate_live_ids(segments)) else None
    runs: int | None = None
    check_space(root, estimate_size(segments, dim), f"writing {rows:,} records")
    keys_name, ids_name, digests_name = file_names(name)
    # 2) Write the files of keys, ids and digests, one batch of records at a time.
    first = last = -1
    with (
        FileWriter(root, keys_name) as keys_file,
        FileWriter(root, ids_name) as ids_file,
        FileWriter(root, digests_name) as digests_file,
    ):
        batch_size = max(1, CHUNK_SIZE // (dim * _find_common_dtype(segments).itemsize))
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
    # 3) Map the files into memory as the new segment.
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
    """Yield for each segment an array with the ids of its live records, int64, ascending.

    Live records are neither deleted nor replaced.
    """
    for segment in segments:
        ids = segment.columns.ids
        yield ids[segment.live_rows().ids()] if segment.dead else ids


def estimate_size(segments: Sequence[Segment], dim: int) -> int:
    """Estimate the number of bytes that the live records of some segments take on disk as one new segment.

    Live records are neither deleted nor replaced. The estimate assumes that keys are not compressed, and that
    an id takes 8 bytes.

    Args:
        segments: one or more segments (immutable sets of records).
        dim: number of components of a key.
    """
    return sum(segment.live for segment in segments) * (dim * _find_common_dtype(segments).itemsize + 8)


def _find_common_dtype(segments: Sequence[Segment]) -> np.dtype[Any]:
    """Return the smallest dtype that can hold the keys of all segments (sets of records): float16 or float32.

    Args:
        segments: one or more segments.
    """
    return np.result_type(*(segment.columns.dtype for segment in segments))


def file_names(name: str) -> tuple[str, str, str]:
    """Return the paths of a segment's files, relative to the datastore's directory.

    Args:
        name: number of the segment, at least 8 digits.

    Returns:
        Paths of the file of keys, the file of ids, and the file with digests of the keys' blocks.
    """
    return f"segments/{name}.keys", f"segments/{name}.ids", f"segments/{name}.digests"


def convert_to_stored_precision(keys: Keys) -> StoredKeys:
    """Convert keys to the precision in which they are stored.

    Args:
        keys: float32, shape (n, dim), n >= 1.

    Returns:
        The keys as float16; `keys` itself if the absolute value of a component exceeds 65504.
    """
    return keys if max(keys.max(), -keys.min()) > _FLOAT16_MAX else keys.astype(np.float16)


def add_buffered(segments: Sequence[Segment], new_segment: Segment) -> list[Segment]:
    """Add a new segment, which is in memory, to the segments of a group, and return the new list of segments.

    A segment is an immutable set of records. The new segment is merged with earlier segments in memory that
    are not larger than the new segment. So the number of segments in memory, and the number of times that a
    record is copied, grow with the logarithm of the number of records.

    Args:
        segments: the group's segments so far; the argument is not changed.
        new_segment: new segment in memory, of the same group.

    Returns:
        The segments of the group; the new or merged segment is the last.
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
        new_segment = Segment.from_arrays(new_segment.group, ids, keys)


def mark_rows_dead(
    groups: Mapping[int, Sequence[Segment]],
    group_numbers: Iterable[int],
    first: int,
    last: int,
    find_rows: Callable[[Segment], IdRanges],
) -> dict[int, list[Segment]]:
    """Mark records in segments as deleted or replaced (dead), and return the segments of the changed groups.

    A segment is an immutable set of records; row i is its i-th record. The arguments are not changed: for a
    segment with newly dead rows, a new object is made.

    Args:
        groups: all segments (immutable sets of records) of each group, by group number.
        group_numbers: numbers of the groups in which rows may be marked.
        first: smallest record id of the rows to mark.
        last: largest record id of the rows to mark. Segments without ids from `first` to `last` are skipped.
        find_rows: function that returns the row numbers of a segment to mark, as ranges.

    Returns:
        A dict from group number to all segments of the group: new objects for segments with newly dead rows,
        and the unchanged segments. Groups without newly dead rows are not in the dict.
    """
    changed: dict[int, list[Segment]] = {}
    for group in group_numbers:
        for segment in groups[group]:
            if segment.first_id <= last and segment.last_id >= first:
                rows = find_rows(segment) - segment.dead
                if rows:
                    group_segments = changed.setdefault(group, list(groups[group]))
                    group_segments[group_segments.index(segment)] = segment.mark_dead(rows)
    return changed
