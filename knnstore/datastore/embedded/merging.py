"""Several segments read as one, and written as one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Groups, Ids, Keys
from knnstore.datastore.embedded.manifest import SegmentEntry
from knnstore.datastore.embedded.packing import CodecFile, IdsPacker, is_worth_packing
from knnstore.datastore.embedded.segment import MappedColumns, Segment, StoredKeys
from knnstore.datastore.ranges import IdRanges
from knnstore.datastore.records import ID_LIMIT
from knnstore.durable import FileWriter, StoredFile, sync_directory
from knnstore.errors import CorruptDatastoreError
from knnstore.space import check_space

CHUNK_SIZE = 4 << 20
"""Bytes of keys that a merge holds at a time."""

_LEAST_SHARE = 64  # rows of a segment that are looked at together, however many segments there are
_FLOAT16_MAX = 65504.0
_LARGEST = 1 << 24  # rows; segments are not merged beyond this


def merged(
    segments: Sequence[Segment],
    *,
    ids: IdRanges | None = None,
    batch_size: int,
    codec: CodecFile | None = None,
) -> Iterator[tuple[Ids, StoredKeys, Groups]]:
    """Yield the live records of several segments by ascending id, in batches of at most `batch_size`.

    An id is live in one segment at most. Memory is that of a batch, and of some ids of each segment where
    their id ranges overlap; `ids` leaves only the records in some ranges. With a codec there are its codes in
    place of keys.
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
    """Rows of several segments by ascending id; arrays of shape (n,)."""

    ids: Ids
    owners: NDArray[np.int64]
    """Whose they are: index of the segment."""
    numbers: NDArray[np.int64]
    """Which row of it."""

    @classmethod
    def none(cls) -> Self:
        return cls(*np.empty((3, 0), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def part(self, which: slice | NDArray[np.int64]) -> Self:
        return type(self)(*(array[which] for array in self))


def _in_order(segments: Sequence[Segment], ids: IdRanges | None, batch_size: int) -> Iterator[_Rows]:
    """Yield the live rows of several segments, some at a time; looks only at segments whose turn has come."""
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
        # Up to the least id at which some segment's share ends, all are complete.
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
    """Read what belongs to some rows, one segment after the other."""
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
    """A place among the wanted rows of a segment; costs nothing for rows that are not wanted."""

    def __init__(self, owner: int, segment: Segment, rows: IdRanges) -> None:
        self.owner = owner
        self.ids = segment.columns.ids if rows else np.empty(0, np.int64)
        self._rows = rows
        # How many wanted rows there are before each range, and in all.
        self._before = np.append(0, np.cumsum(rows.stops - rows.starts))
        self._done = 0
        self.next_id = -1

    def advance(self) -> bool:
        """Look at the next row; False where none is left."""
        if self._done == self._before[-1]:
            return False
        self.next_id = self._id(self._done)
        return True

    def id_after(self, rows: int) -> int:
        """The id of the last of the next so many rows."""
        return self._id(min(self._done + rows, int(self._before[-1])) - 1)

    def take(self, bound: int) -> NDArray[np.int64]:
        """Pass the rows with ids up to a bound and return them."""
        row = int(np.searchsorted(self.ids, bound, side="right"))
        at = int(np.searchsorted(self._rows.starts, row, side="right")) - 1
        stop = int(self._before[at] + min(row, self._rows.stops[at]) - self._rows.starts[at])
        taken = self._numbers(np.arange(self._done, stop))
        self._done = stop
        return taken

    def _numbers(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row numbers of the first wanted row (0), the second (1), and so on."""
        at = np.searchsorted(self._before, wanted, side="right") - 1
        numbers: NDArray[np.int64] = self._rows.starts[at] + wanted - self._before[at]
        return numbers

    def _id(self, wanted: int) -> int:
        return int(self.ids[self._numbers(np.array([wanted]))[0]])


def merge_plan(segments: Sequence[Segment], ratio: int) -> list[list[Segment]]:
    """Choose runs of neighbors to merge, so that each segment has `ratio` times the rows of the next.

    The logarithmic method (Bentley and Saxe, 1980): the number of segments, and how often a row is
    rewritten, grow with the logarithm of the rows. Each run has two segments or more.
    """
    stack: list[list[Segment]] = []
    for segment in segments:
        stack.append([segment])
        while len(stack) > 1:
            previous, last = (sum(s.live for s in run) for run in stack[-2:])
            settled = len(stack[-2]) == 1 and previous >= ratio * last  # what is rewritten takes all along
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
    """Write the live rows of segments of one group, one or more, as the files of a new one, durably.

    See `MappedColumns` for `aside`.

    Raises:
        DiskFullError: it will not fit; nothing was written.
        OSError: the disk became full, or is broken.
        CorruptDatastoreError: what is to be rewritten is damaged; nothing was written.
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
        name, group, rows, dtype.name, first, last, stored, stored_ids, digests_name,
        codes=codec.entry if codec else None, runs=runs,
    )  # fmt: skip
    columns = MappedColumns(root, entry, dim, aside, trusted=True, codec_file=codec)
    if columns.problem is not None:
        raise CorruptDatastoreError(columns.problem)
    return Segment(group, rows, first, last, columns, entry=entry)


def _live_ids(segments: Sequence[Segment]) -> Iterator[Ids]:
    for segment in segments:
        ids = segment.columns.ids
        yield ids[segment.live_rows().ids()] if segment.dead else ids


def size_of(segments: Sequence[Segment], dim: int) -> int:
    """Bytes that the live rows of segments take as one."""
    return sum(segment.live for segment in segments) * (dim * _dtype(segments).itemsize + 8)


def _dtype(segments: Sequence[Segment]) -> np.dtype[Any]:
    """The type of the keys that holds those of each segment."""
    return np.result_type(*(segment.columns.dtype for segment in segments))


def file_names(name: str) -> tuple[str, str, str]:
    """The names of a segment's files: keys, ids, digests."""
    return f"segments/{name}.keys", f"segments/{name}.ids", f"segments/{name}.digests"


def stored_keys(keys: Keys) -> StoredKeys:
    """Keys in half precision, where their range allows it."""
    return keys if max(keys.max(), -keys.min()) > _FLOAT16_MAX else keys.astype(np.float16)


def with_buffered(segments: Sequence[Segment], fresh: Segment) -> list[Segment]:
    """Append a segment that is in memory, merging it with earlier ones that are not larger.

    So each row is copied a logarithmic number of times, and there are as few such segments.
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
    """What some groups become when some rows with ids from first to last die; only those that change."""
    changed: dict[int, list[Segment]] = {}
    for group in among:
        for segment in groups[group]:
            if segment.first_id <= last and segment.last_id >= first:
                rows = rows_in(segment) - segment.dead
                if rows:
                    found = changed.setdefault(group, list(groups[group]))
                    found[found.index(segment)] = segment.without(rows)
    return changed
