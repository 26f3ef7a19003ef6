"""Shards of Qdrant's engine in this process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

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
    RangeFloat,
    ScalarQuantizationConfig,
    ScalarType,
    UpdateOperation,
    VectorStorageDatatype,
)

from knnstore.datastore import Metric
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
        content = status.read_bytes()
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
        # Indexed from the first point on; the graph gets links within each group, not within positions.
        for field, parameters in (
            (GROUP, IntegerIndexParams(lookup=True, range=False, is_principal=True)),
            (POSITION, IntegerIndexParams(lookup=False, range=True, enable_hnsw=False)),
        ):
            shard.update(UpdateOperation.create_field_index(field, parameters))
        shard.flush()
        return shard


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
