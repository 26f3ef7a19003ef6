"""The FAISS adapter: durable key segments, the large ones searched through inverted files."""

from pathlib import Path
from typing import Any, Self

import numpy as np

from knnstore.datastore import (
    Capabilities,
    Datastore,
    EmbeddedDatastore,
    Filter,
    Keys,
    KeySegments,
    Metric,
    Mode,
    Neighbors,
    Segment,
    StoredFile,
    checked_keys,
)
from knnstore_faiss.flat import nearest_rows
from knnstore_faiss.inverted import InvertedIndex, build, fits
from knnstore_faiss.policy import Policy


class FaissDatastore(EmbeddedDatastore):
    """Vectors in a local directory, searched with FAISS.

    Args:
        segments: the open directory.
        dim: number of components of a vector.
        metric: how distances are measured.
        policy: which indexes to build and how far to search them.
    """

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        super().__init__(segments, dim, metric, nearest_rows)
        self._policy = policy
        self._measuring: dict[StoredFile, InvertedIndex | None] = {}

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory; see `Datastore.open`.

        The parameters are `index`, `nprobe`, `rerank`, `exact_distances` and `neighbors`; see `Policy`.
        """
        metric = Metric(metric)
        policy = Policy.of(params, dim, metric)
        return cls(KeySegments(Path(location), dim, metric, mode), dim, metric, policy)

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Bytes of a record on the disk, with its share of an index; see `SupportsSize.record_size`."""
        exact = params.get("index") == "exact"
        coded = params.get("index", "auto") == "auto"  # at most 8 bits a component
        return 2 * dim + 16 + (0 if exact else (dim if coded else 4 * dim) + 16)

    @property
    def capabilities(self) -> Capabilities:
        """Durable, in half precision, with one writer."""
        exact = self._policy.index == "exact" or (
            self._policy.neighbors == "exact" and self._policy.exact_distances
        )
        return Capabilities(
            exact_search=exact, exact_keys=False, persistent=True, shared_writers=False, checks_keys=True
        )

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query; see `Datastore.search`."""
        found = super().search(queries, k, where=where)
        if self._policy.neighbors == ("index" if self._policy.exact_distances else "exact"):
            return self._measured_again(checked_keys(queries, self._dim, what="queries"), found)
        return found

    def _is_indexed(self, group_rows: int) -> bool:
        return self._policy.neighbors != "exact" and self._policy.indexes(group_rows)

    def _measured_again(self, queries: Keys, found: Neighbors) -> Neighbors:
        """Replace the distances of neighbors in indexes by those that are wanted, and sort by them."""
        distances = found.distances.copy()
        for segments in self._segments.by_group().values():
            if not self._policy.indexes(sum(segment.live for segment in segments)):
                continue
            for segment in segments:
                index = self._index_of(segment)
                if index is None:
                    continue
                ids = segment.columns.ids
                rows = np.minimum(np.searchsorted(ids, found.ids), segment.rows - 1)
                inside = (ids[rows] == found.ids) & ~segment.dead.contains(rows)
                for query in np.flatnonzero(inside.any(axis=1)):
                    mine = inside[query]
                    distances[query, mine] = index.distances_to(queries[query], rows[query, mine])
        return Neighbors(found.ids, distances).nearest(distances.shape[1])

    def _index_of(self, segment: Segment) -> InvertedIndex | None:
        if segment.index is None:
            return None
        file = segment.index.file
        if file not in self._measuring:
            self._measuring = {**self._measuring, file: self._open_index(segment, segment.index.parameters)}
        return self._measuring[file]

    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        factory = self._policy.factory(rows, group_rows, self._dim)
        if factory is None or not fits(factory, rows, self._dim, self._metric):
            return None
        return {"faiss": factory}

    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        build(segment, parameters["faiss"], self._dim, self._metric, path)

    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> InvertedIndex | None:
        if "faiss" not in parameters:
            return None
        return InvertedIndex(self._segments.root, segment, self._dim, self._metric, self._policy)


_conforms: type[Datastore] = FaissDatastore  # here a type checker compares every signature
