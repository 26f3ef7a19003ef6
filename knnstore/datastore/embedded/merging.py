"""Reading several segments in order of ids, and writing them as one segment.

Also the plan of which segments to merge, and the changes of segments in memory.
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


def merged(
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
        codec: yields codes of this codec in place of keys.
    """
    left = _Rows.none()
    for some in _in_order(segments, ids, batch_size):
        rows = _Rows.joined([left, some])
        whole = len(rows.ids) // batch_size * batch_size
        for start in range(0, whole, batch_size):
            yield _read(segments, rows.part(slice(start, start + batch_size)), codec)
        left = rows.part(slice(whole, None))
    if len(left.ids):
        yield _read(segments, left, codec)


class _Rows(NamedTuple):
    """Rows of several segments by ascending id; three arrays of shape (n,)."""

    ids: Ids
    owners: NDArray[np.int64]
    """Index of each row's segment."""
    numbers: NDArray[np.int64]
    """Number of each row in its segment."""

    @classmethod
    def none(cls) -> Self:
        return cls(*np.empty((3, 0), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def part(self, which: slice | NDArray[np.int64]) -> Self:
        return type(self)(*(array[which] for array in self))


def _in_order(segments: Sequence[Segment], ids: IdRanges | None, batch_size: int) -> Iterator[_Rows]:
    """Yield the live rows of several segments, by ascending id, some at a time.

    A segment is not read before the ids reach its first id.
    """
    waiting = sorted(range(len(segments)), key=lambda owner: segments[owner].first_id, reverse=True)
    cursors: list[_Cursor] = []
    while cursors or waiting:
        bound = min((cursor.id_after(batch_size) for cursor in cursors), default=ID_LIMIT)
        while waiting and segments[waiting[-1]].first_id <= bound:
            owner = waiting.pop()
            cursor = _Cursor(owner, segments[owner], segments[owner].live_rows(ids))
            if cursor.advance():
                cursors.append(cursor)
                bound = min(bound, cursor.id_after(batch_size))
        # All rows up to the least id at which a segment's share ends are known now.
        sharing = [cursor for cursor in cursors if cursor.next_id <= bound]
        share = max(_LEAST_SHARE, batch_size // max(1, len(sharing)))
        bound = min([bound, *(cursor.id_after(share) for cursor in sharing)])
        taken = [_taken(cursor, bound) for cursor in sharing if cursor.next_id <= bound]
        cursors = [cursor for cursor in cursors if cursor.advance()]
        if len(taken) > 1:
            rows = _Rows.joined(taken)
            yield rows.part(np.argsort(rows.ids))
        else:
            yield from taken


def _taken(cursor: "_Cursor", bound: int) -> _Rows:
    numbers = cursor.take(bound)
    return _Rows(cursor.ids[numbers], np.full(len(numbers), cursor.owner), numbers)


def _read(
    segments: Sequence[Segment], rows: _Rows, codec: CodecFile | None
) -> tuple[Ids, StoredKeys, Groups]:
    """Read the keys or codes of some rows, one segment after the other."""
    order = np.argsort(rows.owners, kind="stable")
    owners, starts = np.unique(rows.owners[order], return_index=True)
    pieces = [
        (segments[owner], at) for owner, at in zip(owners.tolist(), np.split(order, starts[1:]), strict=True)
    ]
    parts = [
        segment.columns.codes_at(rows.numbers[at], codec)
        if codec
        else segment.columns.keys_at(rows.numbers[at])
        for segment, at in pieces
    ]
    keys = np.empty((len(order), parts[0].shape[1]), np.result_type(*parts))
    groups = np.empty(len(order), np.int32)
    for (segment, at), part in zip(pieces, parts, strict=True):
        keys[at], groups[at] = part, segment.group
    return rows.ids, keys, groups


class _Cursor:
    """A position among the wanted rows of a segment. Rows that are not wanted cost nothing."""

    def __init__(self, owner: int, segment: Segment, rows: IdRanges) -> None:
        self.owner = owner
        self.ids = segment.columns.ids if rows else np.empty(0, np.int64)
        self._rows = rows
        # Number of wanted rows before each range, then of all ranges.
        self._before = np.append(0, np.cumsum(rows.stops - rows.starts))
        self._done = 0
        self.next_id = -1

    def advance(self) -> bool:
        """Set `next_id` to the id of the next wanted row. Returns False if no row is left."""
        if self._done == self._before[-1]:
            return False
        self.next_id = self._id(self._done)
        return True

    def id_after(self, rows: int) -> int:
        """Return the id of the last of the next `rows` wanted rows."""
        return self._id(min(self._done + rows, int(self._before[-1])) - 1)

    def take(self, bound: int) -> NDArray[np.int64]:
        """Return the numbers of the next wanted rows with ids up to a bound, and move behind them."""
        row = int(np.searchsorted(self.ids, bound, side="right"))
        at = int(np.searchsorted(self._rows.starts, row, side="right")) - 1
        stop = int(self._before[at] + min(row, self._rows.stops[at]) - self._rows.starts[at])
        taken = self._numbers(np.arange(self._done, stop))
        self._done = stop
        return taken

    def _numbers(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert numbers among the wanted rows (0 is the first wanted row) to row numbers of the segment."""
        at = np.searchsorted(self._before, wanted, side="right") - 1
        numbers: NDArray[np.int64] = self._rows.starts[at] + wanted - self._before[at]
        return numbers

    def _id(self, wanted: int) -> int:
        return int(self.ids[self._numbers(np.array([wanted]))[0]])


def merge_plan(segments: Sequence[Segment], ratio: int) -> list[list[Segment]]:
    """Choose runs of neighboring segments to merge, so that each has `ratio` times the rows of the next.

    This is the logarithmic method (Bentley and Saxe, 1980): the number of segments, and how often a row is
    rewritten, grow with the logarithm of the number of rows. Each run has at least two segments.
    """
    stack: list[list[Segment]] = []
    for segment in segments:
        stack.append([segment])
        while len(stack) > 1:
            previous, last = (sum(s.live for s in run) for run in stack[-2:])
            settled = (
                len(stack[-2]) == 1 and previous >= ratio * last
            )  # a run that is rewritten anyway takes all of its neighbors
            if settled or previous + last > _LARGEST:
                break
            stack[-2:] = [stack[-2] + stack[-1]]
    return [run for run in stack if len(run) > 1]


def write_segment(
    root: Path,
    name: str,
    segments: Sequence[Segment],
    dim: int,
    aside: dict[StoredFile, int],
    codec: CodecFile | None = None,
) -> Segment:
    """Write the live rows of one or more segments of a group as the files of a new segment, durably.

    See `MappedColumns` for `aside`.

    Raises:
        DiskFullError: the disk has too little room; nothing was written.
        OSError: the disk became full or failed.
        CorruptDatastoreError: a segment is damaged; no manifest names the new files.
    """
    group, rows = segments[0].group, sum(segment.live for segment in segments)
    dtype = np.dtype(np.uint8) if codec else _dtype(segments)
    packer = IdsPacker() if is_worth_packing(_live_ids(segments)) else None
    runs: int | None = None
    check_space(root, size_of(segments, dim), f"writing {rows:,} records")
    keys_name, ids_name, digests_name = file_names(name)
    first = last = -1
    with (
        FileWriter(root, keys_name) as keys_file,
        FileWriter(root, ids_name) as ids_file,
        FileWriter(root, digests_name) as digests_file,
    ):
        batch_size = max(1, CHUNK_SIZE // (dim * _dtype(segments).itemsize))
        for ids, keys, _ in merged(segments, batch_size=batch_size, codec=codec):
            keys_file.write(keys.astype(dtype, copy=False))
            ids_file.write(packer.low(ids) if packer else ids)
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
    columns = MappedColumns(root, entry, dim, aside, trusted=True, codec_file=codec)
    if columns.problem is not None:
        raise CorruptDatastoreError(columns.problem)
    return Segment(group, rows, first, last, columns, entry=entry)


def _live_ids(segments: Sequence[Segment]) -> Iterator[Ids]:
    for segment in segments:
        ids = segment.columns.ids
        yield ids[segment.live_rows().ids()] if segment.dead else ids


def size_of(segments: Sequence[Segment], dim: int) -> int:
    """Return the bytes that the live rows of segments take as one segment of uncoded keys."""
    return sum(segment.live for segment in segments) * (dim * _dtype(segments).itemsize + 8)


def _dtype(segments: Sequence[Segment]) -> np.dtype[Any]:
    """Return the smallest dtype that holds the keys of all segments."""
    return np.result_type(*(segment.columns.dtype for segment in segments))


def file_names(name: str) -> tuple[str, str, str]:
    """Return the names of a segment's files: keys, ids, digests."""
    return f"segments/{name}.keys", f"segments/{name}.ids", f"segments/{name}.digests"


def stored_keys(keys: Keys) -> StoredKeys:
    """Return keys in half precision, or unchanged if one exceeds its range."""
    return keys if max(keys.max(), -keys.min()) > _FLOAT16_MAX else keys.astype(np.float16)


def with_buffered(segments: Sequence[Segment], fresh: Segment) -> list[Segment]:
    """Return `segments` with one more in memory, which is merged with earlier ones that are not larger.

    Each row is copied a logarithmic number of times, and the number of segments in memory stays logarithmic.
    """
    kept = list(segments)
    while True:
        same = [s for s in kept if s.group == fresh.group and s.entry is None]
        if not same or same[-1].rows > fresh.rows:
            return [*kept, fresh]
        former = same[-1]
        kept.remove(former)
        alive = former.live_rows().ids()
        ids = np.concatenate([former.columns.ids[alive], fresh.columns.ids])
        keys = np.concatenate([former.columns.keys[alive], fresh.columns.keys])
        if len(alive) and former.last_id > fresh.first_id:
            order = np.argsort(ids)
            ids, keys = ids[order], keys[order]
        fresh = Segment.in_memory(fresh.group, ids, keys)


def without_rows(
    groups: Mapping[int, Sequence[Segment]],
    among: Iterable[int],
    first: int,
    last: int,
    rows_in: Callable[[Segment], IdRanges],
) -> dict[int, list[Segment]]:
    """Mark rows dead, and return the new segments of each group that changes.

    Args:
        groups: the segments of each group.
        among: the groups to look at.
        first: the smallest id that may be concerned.
        last: the largest id that may be concerned.
        rows_in: returns the rows of a segment to mark.
    """
    changed: dict[int, list[Segment]] = {}
    for group in among:
        for segment in groups[group]:
            if segment.first_id <= last and segment.last_id >= first:
                rows = rows_in(segment) - segment.dead
                if rows:
                    found = changed.setdefault(group, list(groups[group]))
                    found[found.index(segment)] = segment.without(rows)
    return changed
