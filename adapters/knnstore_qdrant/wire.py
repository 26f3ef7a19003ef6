"""A Qdrant server over gRPC: points as bytes, without the client's object for each of them.

For k=1024 these objects take several times longer than the search, and vectors as lists of floats
longer than their bytes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from grpc import RpcError
from qdrant_client import grpc
from qdrant_client.conversions.conversion import RestToGrpc

from knnstore.datastore import Groups, Ids, Keys, Neighbors, positions_of
from knnstore.errors import DatastoreError
from knnstore_qdrant.collection import MARK, Collection
from knnstore_qdrant.conditions import GROUP, POSITION, Condition
from knnstore_qdrant.points import neighbors_of
from knnstore_qdrant.server import ServerPoints, filter_of

_PROBE_SECONDS = 2.0


def answers_over_grpc(collection: Collection) -> bool:
    """Say whether the server at the port for gRPC is the one that REST reaches."""
    request: Any = grpc.GetCollectionInfoRequest(collection_name=collection.name)
    timeout = min(_PROBE_SECONDS, collection.options.timeout)
    try:
        answer = collection.client.grpc_collections.Get(request, timeout=timeout)
    except RpcError:
        return False
    mark: str = answer.result.config.metadata[MARK].string_value
    return collection.mark is not None and mark == collection.mark


class GrpcPoints(ServerPoints):
    """The points of a collection on a server that answers over gRPC."""

    def send(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store points with one request."""
        rows = zip(ids.tolist(), _dense(keys), groups.tolist(), positions_of(ids).tolist(), strict=True)
        points = [
            grpc.PointStruct(
                id=grpc.PointId(num=number),
                vectors=grpc.Vectors(vector=grpc.Vector(dense=key)),
                payload={
                    GROUP: grpc.Value(integer_value=group),
                    POSITION: grpc.Value(integer_value=position),
                },
            )
            for number, key, group, position in rows
        ]
        request: Any = grpc.UpsertPoints(collection_name=self._name, points=points, wait=True)
        self.attempts.change(lambda: _status(self._call("Upsert", request)))

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """The k points nearest to each query."""
        shared: dict[str, Any] = {
            "collection_name": self._name,
            "limit": k,
            "params": RestToGrpc.convert_search_params(self._params(k, exact)),
            "filter": _filter(condition),
            "with_payload": grpc.WithPayloadSelector(enable=False),
        }
        request: Any = grpc.QueryBatchPoints(
            collection_name=self._name,
            query_points=[
                grpc.QueryPoints(query=grpc.Query(nearest=grpc.VectorInput(dense=query)), **shared)
                for query in _dense(queries)
            ],
        )
        answer = self.attempts.read(lambda: self._call("QueryBatch", request))
        if len(answer.result) != len(queries):
            answered = f"{len(answer.result)} of {len(queries)} queries"
            raise DatastoreError(f"{self.attempts.place} answered {answered}")
        return neighbors_of([batch.result for batch in answer.result], k, self._metric, id_at="id.num")

    def delete(self, condition: Condition) -> None:
        """Remove points."""
        selector = grpc.PointsSelector(filter=_filter(condition))
        request: Any = grpc.DeletePoints(collection_name=self._name, points=selector, wait=True)
        self.attempts.change(lambda: _status(self._call("Delete", request)))

    def count(self) -> int:
        """How many points there are."""
        request: Any = grpc.CountPoints(collection_name=self._name, exact=True)
        return int(self.attempts.read(lambda: self._call("Count", request)).result.count)

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """The points with the least ids >= `first`."""
        request: Any = grpc.ScrollPoints(
            collection_name=self._name,
            offset=grpc.PointId(num=first),
            limit=limit,
            filter=_filter(condition),
            with_payload=grpc.WithPayloadSelector(enable=keys),
            with_vectors=grpc.WithVectorsSelector(enable=keys),
        )
        answer = self.attempts.read(lambda: self._call("Scroll", request))
        ids = np.array([point.id.num for point in answer.result], np.int64)
        known = answer.result if keys else []
        vectors = np.empty((len(known), self._dim), np.float32)
        for row, point in enumerate(known):
            vector = point.vectors.vector
            vectors[row] = vector.dense.data or vector.data  # servers before 1.16 fill the latter
        groups = [point.payload[GROUP].integer_value for point in known]
        return ids, vectors, np.array(groups, np.int32)

    def _call(self, method: str, request: Any) -> Any:
        """Make one attempt, within the time that is left."""
        return getattr(self._client.grpc_points, method)(request, timeout=self.attempts.seconds_left())


def _status(answer: Any) -> str:
    return str(grpc.UpdateStatus.Name(answer.result.status)).lower()


def _filter(condition: Condition | None) -> Any:
    return None if condition is None else RestToGrpc.convert_filter(filter_of(condition))


def _dense(vectors: Keys) -> Iterator[Any]:
    """Give each vector as a message, made of bytes."""
    message: Any = grpc.DenseVector
    dim = vectors.shape[1]
    serialized: bytes = message(data=[0.0] * dim).SerializeToString()
    prefix = serialized[: len(serialized) - 4 * dim]  # what stands before the floats
    for vector in vectors.astype("<f4", copy=False):
        yield message.FromString(prefix + vector.tobytes())
