"""One shard of Qdrant's engine in this process, in terms of numpy."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from qdrant_edge import (
    BinaryQuantizationConfig,
    CountRequest,
    Distance,
    EdgeConfig,
    EdgeOptimizersConfig,
    EdgeShard,
    EdgeVectorParams,
    FieldCondition,
    Filter,
    HasIdCondition,
    HnswIndexConfig,
    IntegerIndexParams,
    MatchAny,
    Point,
    QuantizationSearchParams,
    Query,
    QueryBatchRequest,
    QueryRequest,
    RangeFloat,
    ScalarQuantizationConfig,
    ScalarType,
    ScrollRequest,
    SearchParams,
    UpdateOperation,
    VectorStorageDatatype,
)

from knnstore.datastore import Groups, Ids, Keys, Metric, Neighbors, positions_of
from knnstore.errors import DatastoreError
from knnstore_qdrant.conditions import GROUP, POSITION, Condition
from knnstore_qdrant.options import Options
from knnstore_qdrant.points import batch_of, neighbors_of

_POINTS_AT_ONCE = 2048  # a Python object each
_DISTANCES = {Metric.L2: Distance.Euclid, Metric.IP: Distance.Dot}
_DATATYPES = {"float32": VectorStorageDatatype.Float32, "float16": VectorStorageDatatype.Float16}


@contextlib.contextmanager
def engine_errors(path: Path) -> Iterator[None]:
    """Give the engine's errors, which are plain `Exception`, a class and a place."""
    try:
        yield
    except DatastoreError:
        raise
    except Exception as error:
        raise DatastoreError(f"Qdrant's engine failed on {path}: {str(error).splitlines()[0]}") from error


class Shard:
    """An open shard.

    Args:
        path: its directory, which nobody else has open.
        dim: number of components of a vector.
        metric: how distances are measured.
        options: how it is made, and searched.
        create: make it; nothing is at the path.
    """

    def __init__(self, path: Path, dim: int, metric: Metric, options: Options, *, create: bool) -> None:
        self._path, self._dim, self._metric, self._options = path, dim, metric, options
        self._quantized = None
        if options.quantization != "none":
            self._quantized = QuantizationSearchParams(rescore=True, oversampling=options.oversampling)
        with engine_errors(path):
            if not create:
                self._shard = EdgeShard.load(str(path))
                return
            path.mkdir()
            self._shard = EdgeShard.create(str(path), _configuration(dim, metric, options))
            # Indexed from the first point on; the graph gets links within each group, not within positions.
            for field, parameters in (
                (GROUP, IntegerIndexParams(lookup=True, range=False, is_principal=True)),
                (POSITION, IntegerIndexParams(lookup=False, range=True, enable_hnsw=False)),
            ):
                self._shard.update(UpdateOperation.create_field_index(field, parameters))
            self._shard.flush()

    def upsert(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store points, replacing those whose id is present."""
        numbers, positions, groups_of = ids.tolist(), positions_of(ids).tolist(), groups.tolist()
        for start in range(0, len(ids), _POINTS_AT_ONCE):
            points = [
                Point(numbers[row], keys[row], {GROUP: groups_of[row], POSITION: positions[row]})
                for row in range(start, min(start + _POINTS_AT_ONCE, len(ids)))
            ]
            with engine_errors(self._path):
                self._shard.update(UpdateOperation.upsert_points(points))

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """The k points nearest to each query."""
        params = SearchParams(
            hnsw_ef=max(k, self._options.ef), exact=exact, quantization=None if exact else self._quantized
        )
        chosen = None if condition is None else _filter(condition)
        batch = QueryBatchRequest(
            [
                QueryRequest(k, query=Query.Nearest(query), params=params, filter=chosen)
                for query in queries.tolist()  # lists are taken faster than arrays
            ]
        )
        with engine_errors(self._path):
            answers = self._shard.query_batch(batch)
        hits = [([hit.id for hit in answer], [hit.score for hit in answer]) for answer in answers]
        return neighbors_of(hits, k, self._metric)

    def delete(self, condition: Condition) -> None:
        """Remove points."""
        with engine_errors(self._path):
            self._shard.update(UpdateOperation.delete_points_by_filter(_filter(condition)))

    def count(self, condition: Condition | None) -> int:
        """How many points there are."""
        with engine_errors(self._path):
            chosen = None if condition is None else _filter(condition)
            return self._shard.count(CountRequest(exact=True, filter=chosen))

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """The points with the least ids >= `first`."""
        chosen = None if condition is None else _filter(condition)
        request = ScrollRequest(offset=first, limit=limit, filter=chosen, with_payload=keys, with_vector=keys)
        with engine_errors(self._path):
            records, _ = self._shard.scroll(request)
        return batch_of(records, self._dim, keys=keys)

    def flush(self) -> None:
        """Write everything to the disk."""
        with engine_errors(self._path):
            self._shard.flush()

    def optimize(self) -> None:
        """Build graphs and reclaim space."""
        with engine_errors(self._path):
            self._shard.optimize()

    def close(self) -> None:
        """Release the directory."""
        with engine_errors(self._path):
            self._shard.close()


def _configuration(dim: int, metric: Metric, options: Options) -> EdgeConfig:
    quantization = {
        "none": None,
        "scalar": ScalarQuantizationConfig(ScalarType.Int8, always_ram=True),
        "binary": BinaryQuantizationConfig(always_ram=True),
    }[options.quantization]
    return EdgeConfig(
        vectors=EdgeVectorParams(
            size=dim,
            distance=_DISTANCES[metric],
            on_disk=options.on_disk,
            datatype=_DATATYPES[options.datatype],
            quantization_config=quantization,
        ),
        hnsw_config=HnswIndexConfig(
            m=options.m,
            ef_construct=options.ef_construct,
            full_scan_threshold=options.full_scan_threshold,
            on_disk=options.graph_on_disk,
        ),
        optimizers=EdgeOptimizersConfig(indexing_threshold=options.indexing_threshold),
        wal_enabled=True,  # what a killed process added but did not flush is then whole or not there
    )


def _filter(condition: Condition) -> Filter:
    if condition.groups:
        return Filter(must=[FieldCondition(GROUP, match=MatchAny(list(condition.groups)))])
    should: list[FieldCondition | HasIdCondition] = [
        FieldCondition(POSITION, range=RangeFloat(gte=start, lt=stop)) for start, stop in condition.positions
    ]
    if condition.ids:
        should.append(HasIdCondition(set(condition.ids)))
    return Filter(should=should)  # type: ignore[arg-type]  # the stub's list is invariant
