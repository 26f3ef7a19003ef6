"""Shards of Qdrant's engine in this process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from qdrant_edge import (
    BinaryQuantizationConfig,
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
    OrderBy,
    Point,
    Query,
    QueryBatchRequest,
    QueryRequest,
    RangeFloat,
    ScalarQuantizationConfig,
    ScalarType,
    ScoredPoint,
    ScrollRequest,
    SearchParams,
    UpdateOperation,
    VectorStorageDatatype,
)

from knnstore.datastore import Groups, Ids, Keys, Metric, NoFileError, positions_of, read_file
from knnstore.errors import CorruptDatastoreError, DatastoreError, DiskFullError
from knnstore_qdrant.conditions import GROUP, POSITION, Condition
from knnstore_qdrant.options import Options

_DISTANCES = {Metric.L2: Distance.Euclid, Metric.IP: Distance.Dot}
_DATATYPES = {"float32": VectorStorageDatatype.Float32, "float16": VectorStorageDatatype.Float16}
_QUANTIZATION = {
    "none": None,
    "scalar": ScalarQuantizationConfig(ScalarType.Int8, always_ram=True),
    "binary": BinaryQuantizationConfig(always_ram=True),
}

_INDEXES = (
    # Indexed from the first point on; the graph gets links within each group, not within positions.
    (GROUP, IntegerIndexParams(lookup=True, range=False, is_principal=True)),
    (POSITION, IntegerIndexParams(lookup=False, range=True, enable_hnsw=False)),
)
_POINTS_AT_ONCE = 2048  # a Python object each

_NO_SPACE = "No space left on device"


@contextlib.contextmanager
def engine_errors(path: Path) -> Iterator[None]:
    """Give the engine's errors, which are plain `Exception`, a class and a place."""
    try:
        yield
    except DatastoreError:
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the engine is no Exception
        line = (str(error).splitlines() or [type(error).__name__])[0]
        kind = DiskFullError if _NO_SPACE in str(error) else DatastoreError
        raise kind(f"Qdrant's engine failed on {path}: {line}") from error


def load_shard(path: Path, copy_of: Path | None = None) -> EdgeShard:
    """Open the shard in a directory; messages name the one that it is a copy of.

    Raises:
        CorruptDatastoreError: a status file is damaged, with which the engine would take all memory there is.
    """
    for status in path.rglob("status.dat"):  # how many vectors or flags there are, before all else
        try:
            content = read_file(status)
        except NoFileError:
            content = b""
        bits = 8 * sum(file.stat().st_size for file in status.parent.iterdir() if file != status)
        if len(content) < 8 or int.from_bytes(content[:8], "little") > bits:
            named = (copy_of or path) / status.relative_to(path)
            raise CorruptDatastoreError(f"{named} is damaged: restore a backup")
    with engine_errors(copy_of or path):
        return EdgeShard.load(str(path))


def create_shard(path: Path, dim: int, metric: Metric, options: Options) -> EdgeShard:
    """Make a shard in a directory that is not there yet."""
    with engine_errors(path):
        path.mkdir()
        configuration = EdgeConfig(
            vectors=EdgeVectorParams(
                size=dim,
                distance=_DISTANCES[metric],
                on_disk=options.on_disk,
                datatype=_DATATYPES[options.datatype],
                quantization_config=_QUANTIZATION[options.quantization],
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
        shard = EdgeShard.create(str(path), configuration)
        for field, parameters in _INDEXES:
            shard.update(UpdateOperation.create_field_index(field, parameters))
        shard.flush()
        return shard


def index_anew(shard: EdgeShard) -> None:
    """Make the indexes of groups and positions from what the points themselves say."""
    for field, parameters in _INDEXES:
        shard.update(UpdateOperation.delete_field_index(field))
        shard.update(UpdateOperation.create_field_index(field, parameters))


def is_indexed(shard: EdgeShard) -> bool:
    """Whether the indexes say of every point the group and the position that it has."""
    points = list(_scrolled(shard))
    ids = np.array([id for id, _ in points], np.int64)
    groups = np.array([group for _, group in points], np.int64)
    indexed = np.array(sorted(_by_position(shard)), np.int64).reshape(-1, 2)
    if not np.array_equal(indexed, np.stack([ids, positions_of(ids)], axis=1)):
        return False
    return all(
        [id for id, _ in _scrolled(shard, Condition(groups=(group,)))] == ids[groups == group].tolist()
        for group in np.unique(groups).tolist()
    )


def nearest(
    shard: EdgeShard, queries: Keys, k: int, condition: Condition | None, params: SearchParams
) -> list[list[ScoredPoint]]:
    """The points nearest to each query; see `Points.query`."""
    chosen = None if condition is None else filter_of(condition)
    requests = [
        QueryRequest(k, query=Query.Nearest(query), params=params, filter=chosen)
        for query in queries.tolist()  # lists are taken faster than arrays
    ]
    return shard.query_batch(QueryBatchRequest(requests))


def page_of(
    shard: EdgeShard, first: int, limit: int, condition: Condition | None, *, keys: bool, groups: bool = False
) -> list[Any]:
    """The points with the least ids from one on; see `Points.scroll`. Groups come with the keys."""
    chosen = None if condition is None else filter_of(condition)
    request = ScrollRequest(
        offset=first, limit=limit, filter=chosen, with_payload=keys or groups, with_vector=keys
    )
    return shard.scroll(request)[0]


def points_of(ids: Ids, keys: Keys, groups: Groups) -> Iterator[list[Point]]:
    """Make points, some at once."""
    numbers, positions, groups_of = ids.tolist(), positions_of(ids).tolist(), groups.tolist()
    for start in range(0, len(ids), _POINTS_AT_ONCE):
        yield [
            Point(numbers[row], keys[row], {GROUP: groups_of[row], POSITION: positions[row]})
            for row in range(start, min(start + _POINTS_AT_ONCE, len(ids)))
        ]


def filter_of(condition: Condition) -> Filter:
    """Translate a condition."""
    if condition.groups:
        return Filter(must=[FieldCondition(GROUP, match=MatchAny(list(condition.groups)))])
    should: list[FieldCondition | HasIdCondition] = [
        FieldCondition(POSITION, range=RangeFloat(gte=start, lt=stop)) for start, stop in condition.positions
    ]
    if condition.ids:
        should.append(HasIdCondition(set(condition.ids)))
    return Filter(should=should)  # type: ignore[arg-type]  # the stub's list is invariant


def _scrolled(shard: EdgeShard, condition: Condition | None = None) -> Iterator[tuple[int, int]]:
    """The id and the group of all points, or of those that a condition is true of, by ascending id."""
    first = 0
    while True:
        page = page_of(shard, first, _POINTS_AT_ONCE, condition, keys=False, groups=True)
        yield from ((point.id, point.payload[GROUP]) for point in page)
        if len(page) < _POINTS_AT_ONCE:
            return
        first = page[-1].id + 1


def _by_position(shard: EdgeShard) -> Iterator[tuple[int, int]]:
    """The id and the position of all points as the index has them, by ascending position."""
    first, limit = 0, _POINTS_AT_ONCE
    while True:
        order = OrderBy(POSITION, start_from=first)
        page: list[Any] = shard.scroll(ScrollRequest(limit=limit, with_payload=False, order_by=order))[0]
        last = page[-1].order_value if len(page) == limit else None
        yield from ((point.id, point.order_value) for point in page if point.order_value != last)
        if last is None:
            return
        first, limit = last, limit if last > first else 2 * limit  # so many may share a position
