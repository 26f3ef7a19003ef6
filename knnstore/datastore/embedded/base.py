"""The base class of engines that run in the process: everything but the index."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from knnstore.datastore.arguments import checked_k, checked_keys, checked_records
from knnstore.datastore.arrays import Capabilities, DamagedPart, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.distances import nearest_rows
from knnstore.datastore.embedded.directory import erase_segments, read_owner, write_owner
from knnstore.datastore.embedded.exact import ExactIndex, NearestRows
from knnstore.datastore.embedded.group import GroupIndex, GroupSearch, GroupSearches, SegmentIndex
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.neighbors import Neighbors, merge_many
from knnstore.datastore.optional import read_keys
from knnstore.datastore.protocol import BATCH_SIZE, Mode
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import ConfigError, CorruptDatastoreError, DiskFullError
from knnstore.space import check_space


class EmbeddedDatastore(ABC):
    """Vectors in a local directory, as durable key segments that indexes search.

    Keys are kept in half precision or as codes; every index is derived from the keys. One process may write,
    and any number may read its flushed records. No index is loaded before the first search, so adding records
    costs no memory for indexes. A subclass decides which segments have an index, builds it and opens it.

    Args:
        segments: the open directory.
        dim: number of components of a vector.
        metric: metric of the distances.
        nearest: function that finds the nearest rows of a matrix; searches records without an index.
    """

    merge_ratio: ClassVar[int] = 10
    """Smallest ratio of the sizes of a segment and the next segment after `optimize`.

    With a small ratio fewer rows are indexed again; with a large ratio there are fewer segments to search.
    """

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
        """Return the bytes of a record on disk and in an index; see `SupportsSize.record_size`."""
        return 6 * dim + 64

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Return the owner of the datastore in a directory; see `SupportsOwner.owner`.

        Raises:
            ConfigError: the location is the URL of a server.
            CorruptDatastoreError: the file with the owner is damaged.
        """
        if "://" in str(location):
            raise ConfigError(
                f"{location} is the address of a server, and this engine keeps files: name a folder, or an "
                "engine with a server (--store qdrant)"
            )
        return read_owner(Path(location))

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Save the owner of a directory; see `SupportsOwner.claim`."""
        write_owner(Path(location), owner)

    @property
    def capabilities(self) -> Capabilities:
        """Features of this datastore: durable, in half precision, with one writer, and approximate."""
        return Capabilities(
            exact_search=False, exact_keys=False, persistent=True, shared_writers=False, checks_keys=True
        )

    @abstractmethod
    def _is_indexed(self, group_rows: int) -> bool:
        """Check whether a group with this number of live rows is searched by indexes."""

    @abstractmethod
    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """Return the parameters of the index of a segment, JSON values; None if the segment needs no index.

        Args:
            rows: number of rows of the segment, deleted rows included.
            group_rows: number of live rows of the segment's group.
        """

    @abstractmethod
    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Build the index of a segment and write it to a file.

        Args:
            segment: segment on disk.
            parameters: result of `_index_parameters`.
            path: file to create. The caller makes the file durable.
        """

    @abstractmethod
    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> SegmentIndex | None:
        """Open the index file of a segment. Returns None if another engine built the index.

        Args:
            segment: segment with an index; `segment.index` names the file.
            parameters: parameters that were saved with the index.

        Raises:
            FileNotFoundError: the index file is missing.
            CorruptDatastoreError: the index file or the segment's keys are damaged.
        """

    @property
    def dim(self) -> int:
        """Number of components of a vector."""
        return self._dim

    @property
    def metric(self) -> Metric:
        """Metric of the distances."""
        return self._metric

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records, and replace existing records with the same ids; see `Datastore.add`."""
        self._segments.append(*checked_records(ids, keys, groups, self._dim))

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query; see `Datastore.search`.

        Damaged segments are left out.

        Raises:
            CorruptDatastoreError: no query has a neighbor, and a segment that `where` selects is damaged.
        """
        queries, k = checked_keys(queries, self._dim, what="queries"), checked_k(k)
        ids = where.ids if where and where.groups is None else None

        def find_nearest(searches: Sequence[GroupSearch]) -> Neighbors:
            # A small group is not asked for more neighbors than it has, so it takes no memory for them.
            parts = (group.search(queries, min(k, group.rows), ids) for group in searches)
            return merge_many(parts, len(queries), k)

        neighbors = self._searches.search_groups(
            where.groups if where else None, find_nearest, self._create_group_search
        )
        if len(queries) and (neighbors.ids[:, 0] < 0).all():
            self._check_readable(where)
        return neighbors

    def delete(self, ids: IdRanges) -> None:
        """Remove every record in the ranges; see `Datastore.delete`."""
        self._segments.delete(ids)

    def count(self) -> int:
        """Return the number of live records."""
        return self._segments.count()

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once, by ascending id; see `Datastore.iterate`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self._segments.iterate(ids=ids, batch_size=batch_size)

    def get(self, ids: Ids) -> Keys:
        """Return the keys of some records; see `SupportsGet.get`."""
        return read_keys(self, ids)

    def flush(self) -> None:
        """Make all changes durable; see `Datastore.flush`."""
        self._segments.flush()

    def damaged(self) -> list[DamagedPart]:
        """Return the segments that are known to be damaged; see `SupportsDamage.damaged`."""
        return self._segments.damaged()

    def abandon(self, part: DamagedPart) -> None:
        """Remove the records of a damaged part; see `SupportsDamage.abandon`."""
        self._segments.abandon(part)

    def optimize(self) -> None:
        """Merge segments, reclaim the space of deleted records, and write missing indexes and digests.

        Segments that are large enough get an index. Until then their records are searched exactly, which is
        slow for many records, so call `optimize` after adding many records. Damaged segments are skipped.
        """
        self._segments.compact(ratio=self.merge_ratio)
        for segments in self._segments.by_group().values():
            live_rows = sum(segment.live for segment in segments)
            for segment in segments:
                try:
                    self._write_derived_files(segment, live_rows)
                except CorruptDatastoreError:
                    if segment.columns.problem is None:
                        raise
        self._segments.by_group()  # logs damage that was found

    def vacuum(self) -> None:
        """Rewrite segments that hold deleted records, and their indexes; see `SupportsVacuum.vacuum`.

        On a full disk the indexes are left out; a later `optimize` builds them.
        """
        self._segments.vacuum()
        with suppress(DiskFullError):
            self.optimize()

    def verify(self) -> list[str]:
        """Check the size and the SHA-256 of every file. Returns one line for each problem, empty if none."""
        return self._segments.verify()

    def close(self) -> None:
        """Flush, if opened for writing, and release all resources."""
        self._searches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _create_group_search(self) -> GroupSearch:
        """Create the object that searches one group. It holds no records until its `update` is called."""
        exact = ExactIndex(self._dim, self._metric, self._nearest)
        return GroupIndex(exact, self._open_index, self._is_indexed, self._damaged)

    def _check_readable(self, where: Filter | None) -> None:
        """Raise CorruptDatastoreError if a damaged segment may hold records that a filter selects."""
        for part in self._segments.damaged():
            if where is None or (
                part.group in where.groups if where.groups is not None else part.ids & where.ids
            ):
                raise CorruptDatastoreError(part.problem)

    def _write_derived_files(self, segment: Segment, group_rows: int) -> None:
        """Write a segment's file of digests, and its index, if they are needed and missing or damaged.

        An index with other parameters than `_index_parameters` returns is built again. Segments in memory are
        skipped.

        Args:
            segment: segment of the group.
            group_rows: number of live rows of the group.
        """
        self._segments.write_digests(segment)
        parameters = self._index_parameters(segment.rows, group_rows)
        if segment.entry is None or parameters is None:  # records that were added meanwhile have no entry yet
            return
        existing_index = segment.index
        if (
            existing_index is None
            or existing_index.parameters != parameters
            or not self._is_intact(existing_index.file)
        ):
            size = segment.rows * self.record_size(self._dim)
            check_space(self._segments.root, size, f"indexing {segment.rows:,} records")
            build = partial(self._build_index, segment, parameters)
            self._segments.write_index(segment, build, parameters)

    def _is_intact(self, file: StoredFile) -> bool:
        """Check whether an index file is not known to be damaged, and matches its size and SHA-256."""
        return file not in self._damaged and self._segments.is_intact(file)
