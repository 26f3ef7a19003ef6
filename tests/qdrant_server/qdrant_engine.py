"""Collections of points, each in one shard of Qdrant's in-process engine."""

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import qdrant_edge as edge
from pydantic import BaseModel
from qdrant_client.http import models
from qdrant_faults import ApiError
from qdrant_requests import edge_filter, edge_index, edge_query, edge_scroll, edge_selector

T = TypeVar("T")


class Definition(BaseModel):
    """What is kept of a collection beside its points."""

    create: models.CreateCollection
    indexes: dict[str, models.PayloadFieldSchema] = {}


class Collection:
    """A collection in a folder of its own.

    Args:
        folder: where it is, or is to be.
        create: how to create it; None opens what is there.
    """

    def __init__(self, folder: Path, create: models.CreateCollection | None = None) -> None:
        self._file = folder / "definition.json"
        shard = folder / "shard"
        if create is None:
            self.definition = Definition.model_validate_json(self._file.read_text())
            self.shard = edge.EdgeShard.load(str(shard))
        else:
            vectors = create.vectors
            if not isinstance(vectors, models.VectorParams):
                raise ApiError(400, "Wrong input: this test server knows one unnamed vector a point only")
            params = edge.EdgeVectorParams(
                vectors.size,
                getattr(edge.Distance, vectors.distance.value),
                datatype=getattr(edge.VectorStorageDatatype, (vectors.datatype or "float32").capitalize()),
            )
            shard.mkdir(parents=True)
            self.shard = edge.EdgeShard.create(str(shard), edge.EdgeConfig(params, max_search_threads=1))
            self.definition = Definition(create=create)
            self.save()
        self.operations = 0
        self.optimizing = False

    def save(self) -> None:
        """Write the definition; a collection exists once it is there."""
        new = self._file.with_suffix(".new")
        new.write_text(self.definition.model_dump_json())
        new.replace(self._file)

    def info(self) -> models.CollectionInfo:
        """Describe it as the server does, with the server's defaults."""
        create, counts = self.definition.create, self.shard.info()
        status = models.CollectionStatus.YELLOW if self.optimizing else models.CollectionStatus.GREEN
        self.optimizing = False  # who waits for green has to ask twice after a change
        hnsw = {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000}
        optimizers = {"default_segment_number": 0, "flush_interval_sec": 5, "indexing_threshold": 10000}
        return models.CollectionInfo(
            status=status,
            optimizer_status=models.OptimizersStatusOneOf.OK,
            points_count=counts.points_count,
            indexed_vectors_count=counts.indexed_vectors_count,
            segments_count=counts.segments_count,
            payload_schema={
                name: models.PayloadIndexInfo(
                    data_type=schema if isinstance(schema, str) else schema.type.value,
                    params=None if isinstance(schema, str) else schema,
                    points=counts.payload_schema[name].points,
                )
                for name, schema in self.definition.indexes.items()
            },
            config=models.CollectionConfig(
                params=models.CollectionParams(**_given(create, models.CollectionParams)),
                hnsw_config=hnsw | _given(create.hnsw_config),
                optimizer_config=optimizers | _given(create.optimizers_config),
                wal_config={"wal_capacity_mb": 32, "wal_segments_ahead": 0},
                quantization_config=create.quantization_config,
                metadata=create.metadata,
            ),
        )


class Engine:
    """All collections of a server.

    Args:
        folder: they are kept in; one engine at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._collections = {}
        for own in folder.iterdir():
            if (own / "definition.json").exists():
                self._collections[unquote(own.name)] = Collection(own)
            else:
                shutil.rmtree(own)  # killed while it was created or deleted

    def close(self) -> None:
        """Release everything."""
        with self._lock:
            for collection in self._collections.values():
                collection.shard.close()
            self._collections.clear()

    def forget(self, keep_collections: bool) -> None:
        """Drop all points, and the collections too if they are not to be kept."""
        with self._lock:
            for name, collection in [*self._collections.items()]:
                self.delete_collection(name)
                if keep_collections:
                    self.create_collection(name, collection.definition.create)
                    for field, schema in collection.definition.indexes.items():
                        self.create_index(name, field, schema, wait=True)

    def get_collections(self) -> models.CollectionsResponse:
        """List the collections."""
        with self._lock:
            names = [models.CollectionDescription(name=name) for name in self._collections]
        return models.CollectionsResponse(collections=names)

    def exists(self, name: str) -> models.CollectionExistence:
        """Say whether there is such a collection."""
        return models.CollectionExistence(exists=name in self._collections)

    def create_collection(self, name: str, create: models.CreateCollection) -> bool:
        """Create a collection."""
        with self._lock:
            if name in self._collections:
                raise ApiError(409, f"Wrong input: Collection `{name}` already exists!")
            self._collections[name] = Collection(self._folder / quote(name, safe=""), create)
        return True

    def delete_collection(self, name: str) -> bool:
        """Delete a collection; whether it was there."""
        with self._lock:
            collection = self._collections.pop(name, None)
            if collection is None:
                return False
            collection.shard.close()
            own = self._folder / quote(name, safe="")
            (own / "definition.json").unlink()
            shutil.rmtree(own)
        return True

    def info(self, name: str) -> models.CollectionInfo:
        """Describe a collection."""
        return self._with(name, Collection.info)

    def update_collection(self, name: str, update: models.UpdateCollection) -> bool:
        """Change a collection's configuration; it is busy optimizing until somebody asked how it is."""

        def change(collection: Collection) -> bool:
            create = collection.definition.create
            for part in ("optimizers_config", "hnsw_config"):
                old, new = getattr(create, part), getattr(update, part)
                if new is not None:
                    setattr(create, part, type(new)(**_given(old) | _given(new)))
            create.metadata = {**(create.metadata or {}), **(update.metadata or {})} or None
            collection.save()
            collection.optimizing = True
            return True

        return self._with(name, change)

    def create_index(
        self, name: str, field: str, schema: models.PayloadFieldSchema, *, wait: bool
    ) -> models.UpdateResult:
        """Index a payload field."""

        def create(collection: Collection) -> None:
            collection.shard.update(edge.UpdateOperation.create_field_index(field, edge_index(schema)))
            collection.definition.indexes[field] = schema
            collection.save()

        return self._update(name, create, wait)

    def upsert(
        self, name: str, points: Sequence[models.PointStruct], *, where: models.Filter | None, wait: bool
    ) -> models.UpdateResult:
        """Store points; of those that exist, only those that a filter matches are replaced."""
        made = [edge.Point(point.id, point.vector, point.payload) for point in points]
        operation = edge.UpdateOperation.upsert_points(made, edge_filter(where))
        return self._update(name, lambda collection: collection.shard.update(operation), wait)

    def delete(self, name: str, points: models.PointsSelector, *, wait: bool) -> models.UpdateResult:
        """Delete points, by id or by filter."""
        if isinstance(points, models.PointIdsList):
            operation = edge.UpdateOperation.delete_points(points.points)
        else:
            operation = edge.UpdateOperation.delete_points_by_filter(edge_filter(points.filter))
        return self._update(name, lambda collection: collection.shard.update(operation), wait)

    def query(self, name: str, request: models.QueryRequest) -> list[edge.ScoredPoint]:
        """Find points."""
        return self._with(name, lambda collection: collection.shard.query(edge_query(request)))

    def scroll(self, name: str, request: models.ScrollRequest) -> tuple[list[edge.Record], int | str | None]:
        """Read a page of points, and where the next one begins."""
        return self._with(name, lambda collection: collection.shard.scroll(edge_scroll(request)))

    def retrieve(self, name: str, request: models.PointRequest) -> list[edge.Record]:
        """Read points by id."""
        payload = True if request.with_payload is None else edge_selector(request.with_payload)
        vector = bool(request.with_vector)
        return self._with(name, lambda collection: collection.shard.retrieve(request.ids, payload, vector))

    def count(self, name: str, where: models.Filter | None) -> models.CountResult:
        """Count points."""
        request = edge.CountRequest(exact=True, filter=edge_filter(where))
        return models.CountResult(count=self._with(name, lambda collection: collection.shard.count(request)))

    def _update(self, name: str, apply: Callable[[Collection], None], wait: bool) -> models.UpdateResult:
        def update(collection: Collection) -> models.UpdateResult:
            apply(collection)
            collection.operations += 1
            status = models.UpdateStatus.COMPLETED if wait else models.UpdateStatus.ACKNOWLEDGED
            return models.UpdateResult(operation_id=collection.operations, status=status)

        return self._with(name, update)

    def _with(self, name: str, work: Callable[[Collection], T]) -> T:
        with self._lock:
            if name not in self._collections:
                raise ApiError(404, f"Not found: Collection `{name}` doesn't exist!")
            return work(self._collections[name])


def _given(model: BaseModel | None, into: type[BaseModel] | None = None) -> dict[str, Any]:
    fields = None if into is None else set(into.model_fields)
    return {} if model is None else model.model_dump(include=fields, exclude_none=True)
