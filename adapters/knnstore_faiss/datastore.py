"""The FAISS adapter: durable key segments, the large ones searched through inverted files."""

from pathlib import Path
from typing import Any, Self

from knnstore.datastore import (
    Capabilities,
    Datastore,
    EmbeddedDatastore,
    KeySegments,
    Metric,
    Mode,
    Segment,
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

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory; see `Datastore.open`.

        The parameters are `index`, `nprobe` and `rerank`; see `Policy`.
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
        exact = self._policy.index == "exact"
        return Capabilities(
            exact_search=exact, exact_keys=False, persistent=True, shared_writers=False, checks_keys=True
        )

    def _is_indexed(self, group_rows: int) -> bool:
        return self._policy.indexes(group_rows)

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
