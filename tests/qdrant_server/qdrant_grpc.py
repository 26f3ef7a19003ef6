"""Qdrant's gRPC API over an engine: the client's own generated services and converters."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import qdrant_edge as edge
from grpc import ServicerContext as Context
from qdrant_client import grpc as pb
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc, payload_to_grpc
from qdrant_client.grpc.collections_service_pb2_grpc import (
    CollectionsServicer,
    add_CollectionsServicer_to_server,
)
from qdrant_client.grpc.points_service_pb2_grpc import PointsServicer, add_PointsServicer_to_server
from qdrant_client.grpc.qdrant_pb2_grpc import QdrantServicer, add_QdrantServicer_to_server
from qdrant_client.http import models
from qdrant_engine import Engine
from qdrant_faults import ApiError, ConnectionLost, Faults
from qdrant_http import VERSION, translated

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
}


def serve(port: int, engine: Engine, faults: Faults, api_key: str | None) -> tuple[grpc.Server, int]:
    """Start the services; returns the server and its port, a free one if 0 was given."""
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(32), options=options)
    answering = _Answering(engine, faults, api_key)
    add_QdrantServicer_to_server(Root(answering), server)
    add_CollectionsServicer_to_server(Collections(answering), server)
    add_PointsServicer_to_server(Points(answering), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, bound


class _Answering:
    """What the services share: the engine, and calls with their faults and errors."""

    def __init__(self, engine: Engine, faults: Faults, api_key: str | None) -> None:
        self.engine = engine
        self._faults = faults
        self._api_key = api_key

    def __call__(self, context: Context, endpoint: str, work: Callable[[], Any]) -> Any:
        """Do the work of a call; an error or a lost connection becomes the status of the call."""
        try:
            if self._api_key not in (None, dict(context.invocation_metadata()).get("api-key")):
                raise ApiError(401, "Must provide an API key or an Authorization bearer token")
            return self._faults.answer("grpc", endpoint, lambda: translated(work))
        except ConnectionLost:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
        except ApiError as error:
            if error.retry_after is not None:
                context.set_trailing_metadata((("retry-after", str(round(error.retry_after))),))
            context.abort(_CODES[error.status], str(error))


class _Service:
    def __init__(self, answering: _Answering) -> None:
        self._answering = answering
        self._engine = answering.engine


class Root(_Service, QdrantServicer):
    """What the server is."""

    def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckReply:
        return pb.HealthCheckReply(**self._answering(context, "info", lambda: VERSION))


class Collections(_Service, CollectionsServicer):
    """Collections as such."""

    def Get(self, request: Any, context: Context) -> pb.GetCollectionInfoResponse:
        info = self._answering(context, "get_collection", lambda: self._engine.info(request.collection_name))
        return pb.GetCollectionInfoResponse(result=RestToGrpc.convert_collection_info(info))

    def List(self, request: Any, context: Context) -> pb.ListCollectionsResponse:
        found = self._answering(context, "get_collections", self._engine.get_collections).collections
        return pb.ListCollectionsResponse(
            collections=[pb.CollectionDescription(name=each.name) for each in found]
        )

    def CollectionExists(self, request: Any, context: Context) -> pb.CollectionExistsResponse:
        name = request.collection_name
        found = self._answering(context, "collection_exists", lambda: self._engine.exists(name))
        return pb.CollectionExistsResponse(result=pb.CollectionExists(exists=found.exists))

    def Create(self, request: pb.CreateCollection, context: Context) -> pb.CollectionOperationResponse:
        convert: dict[str, Any] = {
            "hnsw_config": GrpcToRest.convert_hnsw_config_diff,
            "optimizers_config": GrpcToRest.convert_optimizers_config_diff,
            "quantization_config": GrpcToRest.convert_quantization_config,
        }
        given: dict[str, Any] = {
            name: to(getattr(request, name)) for name, to in convert.items() if request.HasField(name)
        }
        for name in ("shard_number", "replication_factor", "write_consistency_factor", "on_disk_payload"):
            if request.HasField(name):
                given[name] = getattr(request, name)
        if request.metadata:
            given["metadata"] = GrpcToRest.convert_payload(request.metadata)
        vectors = GrpcToRest.convert_vectors_config(request.vectors_config)
        create = models.CreateCollection(vectors=vectors, **given)
        name = request.collection_name
        return self._done(context, "create_collection", lambda: self._engine.create_collection(name, create))

    def Update(self, request: pb.UpdateCollection, context: Context) -> pb.CollectionOperationResponse:
        update = GrpcToRest.convert_update_collection(request)
        name = request.collection_name
        return self._done(context, "update_collection", lambda: self._engine.update_collection(name, update))

    def Delete(self, request: Any, context: Context) -> pb.CollectionOperationResponse:
        name = request.collection_name
        return self._done(context, "delete_collection", lambda: self._engine.delete_collection(name))

    def _done(
        self, context: Context, endpoint: str, work: Callable[[], bool]
    ) -> pb.CollectionOperationResponse:
        return pb.CollectionOperationResponse(result=self._answering(context, endpoint, work))


class Points(_Service, PointsServicer):
    """What is in the collections."""

    def Upsert(self, request: pb.UpsertPoints, context: Context) -> pb.PointsOperationResponse:
        points = [GrpcToRest.convert_point_struct(point) for point in request.points]
        where = (
            GrpcToRest.convert_filter(request.update_filter) if request.HasField("update_filter") else None
        )
        name = request.collection_name
        return self._updated(
            context, "upsert", lambda: self._engine.upsert(name, points, where=where, wait=request.wait)
        )

    def Delete(self, request: pb.DeletePoints, context: Context) -> pb.PointsOperationResponse:
        points = GrpcToRest.convert_points_selector(request.points)
        name = request.collection_name
        return self._updated(context, "delete", lambda: self._engine.delete(name, points, wait=request.wait))

    def CreateFieldIndex(self, request: Any, context: Context) -> pb.PointsOperationResponse:
        schema: Any = models.PayloadSchemaType(
            pb.FieldType.Name(request.field_type)[len("FieldType") :].lower()
        )
        if request.HasField("field_index_params"):
            schema = GrpcToRest.convert_payload_schema_params(request.field_index_params)
        name, field = request.collection_name, request.field_name
        return self._updated(
            context,
            "create_payload_index",
            lambda: self._engine.create_index(name, field, schema, wait=request.wait),
        )

    def Query(self, request: pb.QueryPoints, context: Context) -> pb.QueryResponse:
        found = self._answering(context, "query", lambda: self._found(request))
        return pb.QueryResponse(result=found)

    def QueryBatch(self, request: pb.QueryBatchPoints, context: Context) -> pb.QueryBatchResponse:
        def work() -> list[pb.BatchResult]:
            return [pb.BatchResult(result=self._found(query)) for query in request.query_points]

        return pb.QueryBatchResponse(result=self._answering(context, "query", work))

    def Scroll(self, request: pb.ScrollPoints, context: Context) -> pb.ScrollResponse:
        scroll = models.ScrollRequest(
            offset=GrpcToRest.convert_point_id(request.offset) if request.HasField("offset") else None,
            limit=request.limit if request.HasField("limit") else None,
            filter=GrpcToRest.convert_filter(request.filter),
            **_selectors(request),
        )
        points, following = self._answering(
            context, "scroll", lambda: self._engine.scroll(request.collection_name, scroll)
        )
        offset = None if following is None else RestToGrpc.convert_extended_point_id(following)
        return pb.ScrollResponse(result=[_record(point) for point in points], next_page_offset=offset)

    def Get(self, request: pb.GetPoints, context: Context) -> pb.GetResponse:
        ids = [GrpcToRest.convert_point_id(id) for id in request.ids]
        chosen = models.PointRequest(ids=ids, **_selectors(request))
        points = self._answering(
            context, "retrieve", lambda: self._engine.retrieve(request.collection_name, chosen)
        )
        return pb.GetResponse(result=[_record(point) for point in points])

    def Count(self, request: pb.CountPoints, context: Context) -> pb.CountResponse:
        where = GrpcToRest.convert_filter(request.filter)
        counted = self._answering(
            context, "count", lambda: self._engine.count(request.collection_name, where)
        )
        return pb.CountResponse(result=pb.CountResult(count=counted.count))

    def _found(self, request: pb.QueryPoints) -> list[pb.ScoredPoint]:
        query = GrpcToRest.convert_query_points(request)
        points = self._engine.query(request.collection_name, query)
        return [
            pb.ScoredPoint(score=point.score, version=point.version, **_content(point)) for point in points
        ]

    def _updated(
        self, context: Context, endpoint: str, work: Callable[[], models.UpdateResult]
    ) -> pb.PointsOperationResponse:
        result = RestToGrpc.convert_update_result(self._answering(context, endpoint, work))
        return pb.PointsOperationResponse(result=result)


def _selectors(request: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if request.HasField("with_payload"):
        given["with_payload"] = GrpcToRest.convert_with_payload_interface(request.with_payload)
    if request.HasField("with_vectors"):
        given["with_vector"] = GrpcToRest.convert_with_vectors_selector(request.with_vectors)
    return given


def _record(point: edge.Record) -> pb.RetrievedPoint:
    return pb.RetrievedPoint(**_content(point))


def _content(point: edge.ScoredPoint | edge.Record) -> dict[str, Any]:
    own = point.id
    content: dict[str, Any] = {
        "id": pb.PointId(num=own) if isinstance(own, int) else pb.PointId(uuid=str(own))
    }
    if point.payload is not None:
        content["payload"] = payload_to_grpc(point.payload)
    if point.vector is not None:
        content["vectors"] = RestToGrpc.convert_vector_struct_output(point.vector)
    return content
