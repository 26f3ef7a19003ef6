"""A collection on a server as such: making it, recognizing it, and when it is indexed."""

import time
from collections.abc import Mapping
from uuid import uuid4

from qdrant_client import QdrantClient, models

from knnstore.datastore import Metric
from knnstore.errors import (
    DatastoreError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)
from knnstore_qdrant.attempts import Attempts, pauses
from knnstore_qdrant.conditions import GROUP, POSITION
from knnstore_qdrant.options import Options

DISTANCES = {Metric.L2: models.Distance.EUCLID, Metric.IP: models.Distance.DOT}
"""What Qdrant calls the metrics."""

MARK = "knnstore"
"""The entry of a collection's metadata with a random number, by which it is recognized."""

OWNER = "knnstore_owner"
"""The entry with who claimed the collection."""

_BULK = 100_000  # so many records added to a handle make the server put indexing off until `index`

_INDEXES: Mapping[str, models.IntegerIndexParams] = {
    # The server keeps points of a group together, and links them in the graph.
    GROUP: models.IntegerIndexParams(
        type=models.IntegerIndexType.INTEGER, lookup=True, range=False, is_principal=True
    ),
    POSITION: models.IntegerIndexParams(
        type=models.IntegerIndexType.INTEGER, lookup=False, range=True, enable_hnsw=False
    ),
}
_QUANTIZATION: Mapping[str, models.QuantizationConfig | None] = {
    "none": None,
    "scalar": models.ScalarQuantization(
        scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
    ),
    "binary": models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True)),
}


class Collection:
    """A collection on a server; `open` comes first."""

    mark: str | None = None
    """The random number in its metadata; None if the server keeps no metadata."""

    exact_keys = True
    """Vectors are kept as float32."""

    quantized = False
    """Searches go by codes."""

    def __init__(self, client: QdrantClient, attempts: Attempts, options: Options) -> None:
        self.client, self.attempts, self.options = client, attempts, options
        self.name = options.collection
        self._added = 0
        self._put_off = False

    def open(self, dim: int, metric: Metric, *, create: bool, must_create: bool) -> None:
        """Find the collection and compare it with what is wanted.

        With `create` it is made, or what an interrupted creation left out; with `must_create` it must not
        be there.
        """
        info = self._describe()
        if info is None:
            if not create:
                raise DatastoreNotFoundError(f"{self.attempts.place} has no collection {self.name!r}")
            mark = uuid4().hex
            self._create(dim, metric, mark)
            info = self._describe()
            if info is None:
                raise DatastoreError(f"{self.attempts.place} does not show the collection it just made")
            taken = self._mark(info) not in (mark, None)
        else:
            taken = bool(self._complete(info) or info.points_count)
        if must_create and taken:
            raise DatastoreExistsError(
                f"{self.attempts.place} has a collection {self.name!r}: name another with collection=NAME"
            )
        vectors = self._checked(info, dim, metric)
        for field, index in _INDEXES.items():
            if create and field not in info.payload_schema:
                self._index(field, index)
        # A process that was killed during a bulk load left it so.
        self._put_off = create and info.config.optimizer_config.indexing_threshold == 0
        self.mark = self._mark(info)
        self.exact_keys = vectors.datatype in (None, models.Datatype.FLOAT32)
        self.quantized = (info.config.quantization_config or vectors.quantization_config) is not None

    def erase(self) -> None:
        """Remove it, unless it is somebody else's; where it is not, nothing happens."""
        info = self._describe()
        if info is None:
            return
        if self._mark(info) is None and not self._complete(info):
            raise self._not_ours()
        self.attempts.write(lambda: self.client.delete_collection(self.name))

    def owner(self) -> str | None:
        """Who claimed it; None where nobody did, or the server keeps no metadata (before 1.16)."""
        info = self._describe()
        owner = (info.config.metadata or {}).get(OWNER) if info else None
        return owner if isinstance(owner, str) else None

    def claim(self, owner: str) -> None:
        """Remember a new owner; the server keeps its other metadata."""
        self.attempts.write(lambda: self.client.update_collection(self.name, metadata={OWNER: owner}))

    def will_add(self, records: int) -> None:
        """Put indexing off during a bulk load: it would be done again and again while points come."""
        self._added += records
        if self._added >= _BULK and not self._put_off:
            self._configure(models.OptimizersConfigDiff(indexing_threshold=0))
            self._put_off = True

    def let_index(self) -> None:
        """Let the server index what was put off, beside other work."""
        self._added = 0
        if self._put_off:
            self._configure(models.OptimizersConfigDiff(indexing_threshold=self.options.indexing_threshold))
            self._put_off = False

    def index(self) -> None:
        """Let the server index everything, and wait until it has."""
        self.let_index()
        for pause in pauses():
            info = self.attempts.read(lambda: self.client.get_collection(self.name))
            if info.status == models.CollectionStatus.GREEN:
                return
            if info.status == models.CollectionStatus.RED:
                raise DatastoreError(f"{self.attempts.place} cannot index: {info.optimizer_status}")
            if info.status == models.CollectionStatus.GREY:  # after a restart it waits for a change
                self._configure(models.OptimizersConfigDiff())
            time.sleep(pause)

    def _describe(self) -> models.CollectionInfo | None:
        try:
            return self.attempts.open(lambda: self.client.get_collection(self.name))
        except DatastoreNotFoundError:
            return None

    @staticmethod
    def _mark(info: models.CollectionInfo) -> str | None:
        return (info.config.metadata or {}).get(MARK)

    @staticmethod
    def _complete(info: models.CollectionInfo) -> bool:
        return set(_INDEXES) <= set(info.payload_schema)

    def _create(self, dim: int, metric: Metric, mark: str) -> None:
        options = self.options

        def create() -> None:
            if self.client.collection_exists(self.name):
                return  # the answer to an earlier attempt was lost, or somebody was faster: `open` looks
            self.client.create_collection(
                self.name,
                models.VectorParams(
                    size=dim,
                    distance=DISTANCES[metric],
                    on_disk=options.on_disk,
                    datatype=models.Datatype(options.datatype),
                ),
                shard_number=options.shards or None,
                replication_factor=options.replicas,
                write_consistency_factor=options.write_consistency,
                hnsw_config=models.HnswConfigDiff(
                    m=options.m,
                    ef_construct=options.ef_construct,
                    full_scan_threshold=options.full_scan_threshold,
                    on_disk=options.graph_on_disk,
                ),
                optimizers_config=models.OptimizersConfigDiff(indexing_threshold=options.indexing_threshold),
                quantization_config=_QUANTIZATION[options.quantization],
                metadata={MARK: mark},
            )

        self.attempts.write(create)

    def _index(self, field: str, index: models.IntegerIndexParams) -> None:
        self.attempts.change(
            lambda: self.client.create_payload_index(self.name, field, index, wait=True).status.value
        )

    def _checked(self, info: models.CollectionInfo, dim: int, metric: Metric) -> models.VectorParams:
        """The description of the vectors, if it is what is wanted."""
        vectors = info.config.params.vectors
        if not isinstance(vectors, models.VectorParams) or (info.points_count and not self._complete(info)):
            raise self._not_ours()
        there = {qdrants: ours for ours, qdrants in DISTANCES.items()}.get(vectors.distance)
        if (vectors.size, there) != (dim, metric):
            found = there or vectors.distance.value
            raise DatastoreMismatchError(
                f"{self.attempts.place}: collection {self.name!r} has dim {vectors.size} and metric {found}, "
                f"asked for {dim} and {metric}"
            )
        return vectors

    def _not_ours(self) -> DatastoreMismatchError:
        return DatastoreMismatchError(
            f"{self.attempts.place}: collection {self.name!r} was not made by knnstore: name another"
        )

    def _configure(self, optimizers: models.OptimizersConfigDiff) -> None:
        self.attempts.write(lambda: self.client.update_collection(self.name, optimizers_config=optimizers))
