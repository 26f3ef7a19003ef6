"""The hnswlib adapter: durable key segments, the large ones searched through graphs."""

from pathlib import Path
from typing import Any, Self

from knnstore.datastore import Capabilities, Datastore, Metric, Mode
from knnstore.datastore.embedded import EmbeddedDatastore
from knnstore.datastore.files import StoredFile
from knnstore.datastore.manifest import IndexEntry
from knnstore.datastore.rows import Segment
from knnstore.datastore.segments import KeySegments
from knnstore.errors import ConfigError
from knnstore_hnswlib.graph import build
from knnstore_hnswlib.group import GroupIndex
from knnstore_hnswlib.policy import Policy


class HnswlibDatastore(EmbeddedDatastore):
    """Vectors in a local directory, searched with hnswlib.

    Args:
        segments: the open directory.
        dim: number of components of a vector.
        metric: how distances are measured.
        policy: which graphs to build and how far to search them.
    """

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        super().__init__(segments, dim, metric)
        self._policy = policy
        self._damaged: set[StoredFile] = set()

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory; see `Datastore.open`.

        Args:
            location: the directory.
            dim: number of components of a vector, >= 1.
            metric: how distances are measured.
            mode: as in `Datastore.open`.
            **params: `M`, `ef_construction`, `ef` and `exact_up_to`; see `Policy`.
        """
        if dim < 1:
            raise ConfigError(f"dim must be at least 1, got {dim}")
        metric, policy = Metric(metric), Policy.of(params)
        return cls(KeySegments(Path(location), dim, metric, mode), dim, metric, policy)

    @property
    def capabilities(self) -> Capabilities:
        """Durable, in half precision, with one writer; approximate in large groups."""
        return Capabilities(exact_search=False, exact_keys=False, persistent=True, shared_writers=False)

    def optimize(self) -> None:
        """Merge segments, reclaim the space of deleted records, and build graphs for what is large.

        Until then added records are searched exactly, so call it after adding many. A segment is merged
        only with others that hold half as many records together, for its graph is then built anew.
        """
        self._segments.compact(ratio=2)
        for found in self._segments.by_group().values():
            live = sum(segment.live for segment in found)
            for segment in found:
                # What another thread added meanwhile is in memory and has no entry yet.
                if segment.entry and self._policy.has_graph(segment.rows, live):
                    self._index(segment, segment.entry.index)

    def _new_index(self) -> GroupIndex:
        return GroupIndex(self._segments.root, self._dim, self._metric, self._policy, self._damaged)

    def _index(self, segment: Segment, present: IndexEntry | None) -> None:
        """Give a segment its graph, unless it has it, undamaged."""
        if (
            present
            and present.parameters == self._policy.of_graph
            and present.file not in self._damaged
            and self._segments.intact(present.file)
        ):
            return
        self._segments.write_index(
            segment,
            lambda path: build(segment, self._policy, self._dim, self._metric, path),
            self._policy.of_graph,
        )


_conforms: type[Datastore] = HnswlibDatastore  # here a type checker compares every signature
