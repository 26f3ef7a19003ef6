"""What the adapters of libraries that run in the process share: all but the index."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from knnstore.datastore.arguments import checked_k, checked_keys, checked_records
from knnstore.datastore.arrays import Capabilities, DamagedPart, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.distances import nearest_rows
from knnstore.datastore.embedded.erasing import erase_segments
from knnstore.datastore.embedded.exact import ExactIndex, NearestRows
from knnstore.datastore.embedded.group import GroupIndex, GroupSearch, GroupSearches, SegmentIndex
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.owners import read_owner, write_owner
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.neighbors import Neighbors, merge_many
from knnstore.datastore.protocol import BATCH_SIZE, Mode
from knnstore.datastore.ranges import IdRanges
from knnstore.datastore.reading import read_keys
from knnstore.durable import StoredFile
from knnstore.errors import ConfigError, CorruptDatastoreError, DiskFullError
from knnstore.space import check_space


class EmbeddedDatastore(ABC):
    """Vectors in a local directory, as durable key segments that an index for each group searches.

    The keys are kept in half precision; every index is derived from them. One process may write, any
    number may read what it flushes. Nothing is indexed before the first search of a handle, so
    filling a store costs no memory. An adapter says which segments have an index, builds it and opens it.

    Args:
        segments: the open directory.
        dim: number of components of a vector.
        metric: how distances are measured.
        nearest: the engine's own search where there is no index.
    """

    merge_ratio: ClassVar[int] = 10
    """How much larger than the next one `optimize` leaves a segment: an index that is dear to build is
    built anew for fewer rows if this is small, and a search has fewer segments if it is large."""

    def __init__(
        self, segments: KeySegments, dim: int, metric: Metric, nearest: NearestRows = nearest_rows
    ) -> None:
        self._segments = segments
        self._nearest = nearest
        self._dim = dim
        self._metric = metric
        self._damaged: set[StoredFile] = set()
        self._searches = GroupSearches(segments)

    @classmethod
    @abstractmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory; see `Datastore.open`."""

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove the datastore in a directory; see `SupportsErase.erase`."""
        erase_segments(Path(location))

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Bytes of a record on the disk, with its share of an index; see `SupportsSize.record_size`."""
        return 6 * dim + 64

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Who claimed the datastore in a directory; see `SupportsOwner.owner`."""
        if "://" in str(location):
            raise ConfigError(
                f"{location} is the address of a server, and this engine keeps files: name a folder, or an "
                "engine with a server (--store qdrant)"
            )
        return read_owner(Path(location))

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Remember a new owner; see `SupportsOwner.claim`."""
        write_owner(Path(location), owner)

    @property
    def capabilities(self) -> Capabilities:
        """Features of this datastore: durable, in half precision, with one writer, and approximate."""
        return Capabilities(
            exact_search=False, exact_keys=False, persistent=True, shared_writers=False, checks_keys=True
        )

    @abstractmethod
    def _is_indexed(self, group_rows: int) -> bool:
        """Whether a group of so many live rows is searched by indexes at all."""

    @abstractmethod
    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """What describes the index of a segment of so many rows, all of it JSON; None for no index."""

    @abstractmethod
    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Write the index of a segment to a file."""

    @abstractmethod
    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> SegmentIndex | None:
        """Open the index that the segment's entry names, built with these parameters.

        None if it is another engine's.

        Raises:
            FileNotFoundError: its file is gone.
            CorruptDatastoreError: its file is damaged.
        """

    @property
    def dim(self) -> int:
        """Number of components of a vector."""
        return self._dim

    @property
    def metric(self) -> Metric:
        """How distances are measured."""
        return self._metric

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records, replacing those whose id is present; see `Datastore.add`."""
        self._segments.append(*checked_records(ids, keys, groups, self._dim))

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query; see `Datastore.search`.

        What is damaged is left out.

        Raises:
            CorruptDatastoreError: nothing is left to be found of what is asked for.
        """
        queries, k = checked_keys(queries, self._dim, what="queries"), checked_k(k)
        ids = where.ids if where and where.groups is None else None

        def nearest(chosen: Sequence[GroupSearch]) -> Neighbors:
            # A group is not asked for more than it has, so that small ones take no room.
            parts = (group.search(queries, min(k, group.rows), ids) for group in chosen)
            return merge_many(parts, len(queries), k)

        found = self._searches.look(where.groups if where else None, nearest, self._new_group)
        if len(queries) and (found.ids[:, 0] < 0).all():
            self._check_readable(where)
        return found

    def delete(self, ids: IdRanges) -> None:
        """Remove every record in the ranges; see `Datastore.delete`."""
        self._segments.delete(ids)

    def count(self) -> int:
        """How many records are live."""
        return self._segments.count()

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once, by ascending id; see `Datastore.iterate`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self._segments.iterate(ids=ids, batch_size=batch_size)

    def get(self, ids: Ids) -> Keys:
        """Read the keys of some records; see `SupportsGet.get`."""
        return read_keys(self, ids)

    def flush(self) -> None:
        """Return when everything so far is durable; see `Datastore.flush`."""
        self._segments.flush()

    def damaged(self) -> list[DamagedPart]:
        """The damage that is known; see `SupportsDamage.damaged`."""
        return self._segments.damaged()

    def abandon(self, part: DamagedPart) -> None:
        """Give up the records of a damaged part; see `SupportsDamage.abandon`."""
        self._segments.abandon(part)

    def optimize(self) -> None:
        """Merge segments, reclaim the space of deleted records, and make anew what is derived and lacks.

        Large segments have an index. Until then added records are searched exactly, so call it after adding
        many.
        """
        self._segments.compact(ratio=self.merge_ratio)
        for found in self._segments.by_group().values():
            live = sum(segment.live for segment in found)
            for segment in found:
                try:
                    self._derive(segment, live)
                except CorruptDatastoreError:
                    if segment.columns.problem is None:
                        raise
        self._segments.by_group()  # says what turned out to be damaged

    def vacuum(self) -> None:
        """Rewrite what holds deleted records, and the indexes over it; see `SupportsVacuum.vacuum`.

        On a full disk the indexes are left out, which `optimize` makes later.
        """
        self._segments.vacuum()
        with suppress(DiskFullError):
            self.optimize()

    def verify(self) -> list[str]:
        """Check the size and the SHA-256 of every file; one line for each problem."""
        return self._segments.verify()

    def close(self) -> None:
        """Flush, if opened for writing, and release everything."""
        self._searches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _new_group(self) -> GroupSearch:
        """What searches the records of one group; nothing is there yet."""
        exact = ExactIndex(self._dim, self._metric, self._nearest)
        return GroupIndex(exact, self._open_index, self._is_indexed, self._damaged)

    def _check_readable(self, where: Filter | None) -> None:
        """Raise CorruptDatastoreError if there is damage among what a filter asks for."""
        for part in self._segments.damaged():
            if where is None or (
                part.group in where.groups if where.groups is not None else part.ids & where.ids
            ):
                raise CorruptDatastoreError(part.problem)

    def _derive(self, segment: Segment, group_rows: int) -> None:
        """Make the digests and the index of a segment if they are wanted and lack."""
        self._segments.write_digests(segment)
        parameters = self._index_parameters(segment.rows, group_rows)
        if segment.entry is None or parameters is None:  # what was added meanwhile has no entry yet
            return
        present = segment.index
        if present is None or present.parameters != parameters or not self._intact(present.file):
            size = segment.rows * self.record_size(self._dim)
            check_space(self._segments.root, size, f"indexing {segment.rows:,} records")
            build = partial(self._build_index, segment, parameters)
            self._segments.write_index(segment, build, parameters)

    def _intact(self, file: StoredFile) -> bool:
        return file not in self._damaged and self._segments.intact(file)
