"""The base class of vector engines that run in the process. Subclasses add only the index."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from knnstore.datastore.arguments import validate_k, validate_keys, validate_params, validate_records
from knnstore.datastore.arrays import Capabilities, DamagedPart, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.distances import find_nearest_rows
from knnstore.datastore.embedded.codecs import Coding
from knnstore.datastore.embedded.directory import erase_segments, read_owner, write_owner
from knnstore.datastore.embedded.exact import ExactIndex, NearestRows
from knnstore.datastore.embedded.group import GroupIndex, GroupSearch, GroupSearches, SegmentIndex
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.neighbors import Neighbors, merge_many
from knnstore.datastore.protocol import BATCH_SIZE, Mode, read_keys
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import ConfigError, CorruptDatastoreError, DiskFullError
from knnstore.space import check_space


class EmbeddedDatastore(ABC):
    """A datastore in a local directory, whose records are in segments that are searched with indexes.

    A segment is a set of immutable files with records of one group (a numbered set of records, such as a
    domain). Keys are stored in half precision or as codes (compressed keys). An index can always be built
    again from the keys. One process may write, and any number of processes may read the records that the
    writer has flushed. No index is loaded before the first search, so adding records takes no memory for
    indexes. A subclass decides which segments have an index, builds indexes and opens indexes.

    Args:
        segments: the open directory with the segments.
        dim: number of components of a vector.
        metric: metric of the distances.
        policy: the engine's parameters, the result of `_make_policy`; None leaves `_policy` as it is.
        nearest: function that finds the nearest rows of a matrix, as `find_nearest_rows` does. It searches
        the
            records that have no index.
    """

    merge_ratio: ClassVar[int] = 10
    """After `optimize`, a segment of a group has at least this many times the records of the next segment.

    With a small ratio, fewer records must be indexed again; with a large ratio, fewer segments must be
    searched.
    """

    _policy: Any = None

    def __init__(
        self,
        segments: KeySegments,
        dim: int,
        metric: Metric,
        policy: Any = None,
        *,
        nearest: NearestRows = find_nearest_rows,
    ) -> None:
        self._segments = segments
        self._nearest = nearest
        self._dim = dim
        self._metric = metric
        if policy is not None:  # an adapter with an `open` of its own may have set it before
            self._policy = policy
        self._damaged: set[StoredFile] = set()
        self._searches = GroupSearches(segments)

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory.

        Args:
            location: path of the directory, which only this datastore uses.
            dim: number of components of a vector, >= 1.
            metric: metric of the distances.
            mode: ``"r"`` reads an existing datastore, ``"a"`` opens for writing or creates, ``"x"`` creates.
            **params: parameters of the engine; the adapter documents them.

        Raises:
            DatastoreNotFoundError: mode ``"r"`` and no datastore exists.
            DatastoreExistsError: mode ``"x"`` and a datastore exists.
            DatastoreMismatchError: the datastore has another dim or metric.
            LockedError: another process has the datastore open for writing.
            ConfigError: a parameter is unknown or has a bad value.
        """
        metric = Metric(metric)
        policy = cls._make_policy(params, dim, metric)
        segments = KeySegments(Path(location), dim, metric, mode, cls._choose_coding(policy, dim))
        return cls(segments, dim, metric, policy)

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove all files of the datastore in a directory, and the directory if it is empty afterwards.

        Does nothing if the directory does not exist. Raises LockedError if another process writes to the
        datastore.
        """
        erase_segments(Path(location))

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return an estimate of the bytes that one record takes on disk, including its part of an index."""
        return 6 * dim + 64

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Return the name of the store that owns the datastore in a directory; None if no name is saved.

        Raises:
            ConfigError: the location is the URL of a server.
            CorruptDatastoreError: the file with the owner is damaged.
        """
        if "://" in str(location):
            raise ConfigError(
                f"{location} is the address of a server, but this engine keeps its keys in a folder: give a "
                "folder, or choose an engine with a server (--store qdrant)"
            )
        return read_owner(Path(location))

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Save the name of the store to which the datastore in a directory belongs, durably."""
        write_owner(Path(location), owner)

    @property
    def capabilities(self) -> Capabilities:
        """Features of this engine: approximate search, keys in half precision, durable, one writer."""
        return Capabilities(
            exact_search=False, exact_keys=False, persistent=True, shared_writers=False, checks_keys=True
        )

    @classmethod
    def _make_policy(cls, params: dict[str, Any], dim: int, metric: Metric) -> Any:
        """Check the engine's parameters, and return them in the form in which the subclass uses `_policy`.

        The base class accepts no parameters.

        Args:
            params: the parameters that the user gave, by name.
            dim: number of components of a vector.
            metric: metric of the distances.

        Raises:
            ConfigError: a parameter is unknown or has a bad value.
        """
        return validate_params(cls.__name__, params, accepted={})

    @classmethod
    def _choose_coding(cls, policy: Any, dim: int) -> Coding | None:
        """Return how the keys of large groups are compressed to codes; None keeps all in half precision.

        Args:
            policy: the engine's parameters, a result of `_make_policy`.
            dim: number of components of a vector.
        """
        return None

    @abstractmethod
    def _is_indexed(self, group_rows: int) -> bool:
        """Check whether a group of records is large enough to be searched by indexes.

        A group is a numbered set of records, such as a domain. Returns False for a smaller group, whose
        records are all compared with each query.

        Args:
            group_rows: number of records of the group, without deleted and replaced records.
        """

    @abstractmethod
    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """Choose the parameters with which the index of a segment (a set of files with records) is built.

        Args:
            rows: number of records of the segment, deleted records included.
            group_rows: number of records of the segment's group, without deleted and replaced records.

        Returns:
            JSON values by name, which are saved with the index; None if the segment needs no index.
        """

    @abstractmethod
    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Build the index of a segment (a set of files with records), and write the index to a file.

        Args:
            segment: the segment, which is on disk.
            parameters: parameters of the index, the result of `_index_parameters`.
            path: file to create. The caller makes the file durable.
        """

    @abstractmethod
    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> SegmentIndex | None:
        """Open the index file of a segment (a set of files with records).

        Args:
            segment: segment with an index; `segment.index` names the file.
            parameters: parameters that were saved with the index.

        Returns:
            The object that searches the segment with the index. None if this engine cannot use the index
            file, for example because another engine built it.

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
        """Store records; see `Datastore.add`.

        Searches of this handle find the records at once; `flush` makes them durable.
        """
        self._segments.append(*validate_records(ids, keys, groups, self._dim))

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query; see `Datastore.search`.

        Records in damaged files are left out. Raises CorruptDatastoreError if no query has a neighbor, and
        records that `where` selects are damaged.
        """
        queries, k = validate_keys(queries, self._dim, what="queries"), validate_k(k)
        ids = where.ids if where and where.groups is None else None

        def find_nearest(searches: Sequence[GroupSearch]) -> Neighbors:
            """Return the k nearest records of each query in several groups (sets of records)."""
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
        """Delete every record whose id is in the ranges; ids without a record are ignored.

        Searches of this handle leave the deleted records out at once; `flush` makes the deletion durable.
        Raises ReadOnlyError if the handle was opened with mode ``"r"``.
        """
        self._segments.delete(ids)

    def count(self) -> int:
        """Return the number of records. Deleted and replaced records do not count; damaged records count."""
        return self._segments.count()

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every record once, by ascending id, as batches (ids, keys, groups); see `Datastore.iterate`.

        Damaged records are left out. Raises CorruptDatastoreError if a file turns out to be damaged; the next
        call leaves the records of the file out.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self._segments.iterate(ids=ids, batch_size=batch_size)

    def get(self, ids: Ids) -> Keys:
        """Return the keys of records by id, float32, shape (n, dim), in the order of `ids`.

        Raises RecordNotFoundError if an id has no record.
        """
        return read_keys(self, ids)

    def flush(self) -> None:
        """Write all additions and deletions so far to disk, so that they survive a crash or a power loss."""
        self._segments.flush()

    def list_damaged_parts(self) -> list[DamagedPart]:
        """Return a report on each segment (set of files with records) that is known to be damaged.

        The list is empty if no damage is known. The method does not read the files; `verify` does.
        """
        return self._segments.list_damaged_parts()

    def remove_damaged_part(self, part: DamagedPart) -> None:
        """Remove a damaged segment and its records, durably. Other changes become durable too."""
        self._segments.remove_damaged_part(part)

    def optimize(self) -> None:
        """Merge segments, reclaim the space of deleted records, and build missing indexes.

        A segment is a set of files with records. Segments that are large enough get an index. Records without
        an index are searched exactly, which is slow for many records, so call `optimize` after adding many
        records. Missing files with checksums are written too. Damaged segments are skipped.
        """
        self._segments.compact(ratio=self.merge_ratio)
        for segments in self._segments.segments_by_group().values():
            live_rows = sum(segment.live for segment in segments)
            for segment in segments:
                try:
                    self._write_derived_files(segment, live_rows)
                except CorruptDatastoreError:
                    if segment.columns.problem is None:
                        raise
        self._segments.segments_by_group()  # logs damage that was found

    def vacuum(self) -> None:
        """Rewrite all files that contain deleted or replaced records, without these records.

        Then `optimize` is called, which also builds missing indexes. If the disk is too full for `optimize`,
        no error is raised; a later `optimize` builds the indexes.

        Raises:
            DiskFullError: the disk has too little free space to rewrite the files; nothing is rewritten.
        """
        self._segments.vacuum()
        with suppress(DiskFullError):
            self.optimize()

    def verify(self) -> list[str]:
        """Check the size and the SHA-256 of every file of the datastore.

        Returns one line of text for each problem; the list is empty if no problem is found.
        """
        return self._segments.verify()

    def close(self) -> None:
        """Release all resources. If the datastore is open for writing, changes are flushed first."""
        self._searches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _create_group_search(self) -> GroupSearch:
        """Create and return an object that searches one group; it has no records until its first `update`."""
        exact = ExactIndex(self._dim, self._metric, self._nearest)
        return GroupIndex(exact, self._open_index, self._is_indexed, self._damaged)

    def _check_readable(self, where: Filter | None) -> None:
        """Raise CorruptDatastoreError if damaged files may contain records that a filter selects.

        If the filter selects no record of a file that is known to be damaged, the method does nothing.

        Args:
            where: the filter of a search; None selects all records.
        """
        for part in self._segments.list_damaged_parts():
            if where is None or (
                part.group in where.groups if where.groups is not None else part.ids & where.ids
            ):
                raise CorruptDatastoreError(part.problem)

    def _write_derived_files(self, segment: Segment, group_rows: int) -> None:
        """Write the file with the checksums of a segment, and its index file, if they are missing or damaged.

        A segment is a set of files with records. No index is built for a segment that needs no index, or that
        is in memory only. An index is also built again if its parameters differ from the parameters that
        `_index_parameters` returns now.

        Args:
            segment: the segment.
            group_rows: number of records of the segment's group, without deleted and replaced records.

        Raises:
            DiskFullError: the disk has too little free space for the index.
            CorruptDatastoreError: the keys of the segment are damaged.
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
        """Check whether an index file exists, has its saved size and SHA-256, and is not known as damaged."""
        return file not in self._damaged and self._segments.is_intact(file)
