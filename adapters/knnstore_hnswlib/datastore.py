"""The hnswlib adapter: durable key segments, the large ones searched through graphs."""

from pathlib import Path
from typing import Any, Self

from knnstore.datastore import Capabilities, Datastore, EmbeddedDatastore, KeySegments, Metric, Mode, Segment
from knnstore_hnswlib.graph import GraphIndex, build
from knnstore_hnswlib.policy import Policy


class HnswlibDatastore(EmbeddedDatastore):
    """Vectors in a local directory, searched with hnswlib.

    Args:
        segments: the open directory.
        dim: number of components of a vector.
        metric: how distances are measured.
        policy: which graphs to build and how far to search them.
    """

    merge_ratio = 2

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        super().__init__(segments, dim, metric)
        self._policy = policy

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory; see `Datastore.open`.

        The parameters are `M`, `ef_construction`, `ef` and `exact_up_to`; see `Policy`.
        """
        metric, policy = Metric(metric), Policy.of(params)
        return cls(KeySegments(Path(location), dim, metric, mode), dim, metric, policy)

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Bytes of a record on the disk, with its node in a graph; see `SupportsSize.record_size`."""
        return 2 * dim + 16 + 4 * (dim + 1) + 12 * Policy.of(params).M + 32

    @property
    def capabilities(self) -> Capabilities:
        """Durable, in half precision, with one writer; approximate in large groups."""
        return Capabilities(
            exact_search=False, exact_keys=False, persistent=True, shared_writers=False, checks_keys=True
        )

    def _is_indexed(self, group_rows: int) -> bool:
        return self._policy.indexes(group_rows)

    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        return self._policy.of_graph if self._policy.has_graph(rows, group_rows) else None

    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        build(segment, self._policy, self._dim, self._metric, path)

    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> GraphIndex | None:
        if "hnswlib" not in parameters:
            return None
        return GraphIndex(self._segments.root, segment, self._dim, self._metric, self._policy)


_conforms: type[Datastore] = HnswlibDatastore  # here a type checker compares every signature
