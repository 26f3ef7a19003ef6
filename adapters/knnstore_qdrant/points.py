"""The points of a collection on a Qdrant server: selecting, writing, searching and reading points.

A point is a vector with an id and a payload (named values); each record is stored as a point. `Condition`
selects points, `ServerPoints` calls the server over REST, and `GrpcPoints` calls the server over gRPC.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from grpc import RpcError
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import RestToGrpc

from knnstore.datastore import (
    Filter,
    Groups,
    IdRanges,
    Ids,
    Keys,
    Metric,
    Neighbors,
    find_whole_positions,
    id_ranges_from_positions,
    positions_from_ids,
)
from knnstore.errors import DatastoreError, InvalidVectorError
from knnstore_qdrant.collection import GROUP, MARK, POSITION, UPLOAD, Collection

_LISTED_IDS = 10_000
"""Largest number of ids that a condition lists without asking the server which of them exist."""
_BATCH_BYTES = 1 << 20
"""Largest size in bytes of the vectors in one request that adds points; JSON takes up to five times that."""
_BATCH_POINTS = 1000
"""Largest number of points in one request that adds points."""
_LARGEST = 65504.0
"""Largest number in half precision. Qdrant converts larger numbers to infinity, to which nothing is near."""
_PROBE_SECONDS = 2.0
"""Largest time in seconds to find out whether the server answers over gRPC."""
_NEVER = models.Filter(must=[models.FieldCondition(key=POSITION, range=models.Range(lt=0))])
"""A filter that no point matches. A request with this update filter inserts new points and updates none."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A choice of points: by groups, by positions or ids, by the name of an upload, or by several of these.

    A group is a numbered set of records, such as a domain. A position is the number of a record's token in
    the store. The truth value of a condition is False if it selects no point.
    """

    groups: tuple[int, ...] = ()
    """Group numbers whose points are selected; empty for all groups."""
    positions: tuple[tuple[int, int], ...] = ()
    """Ranges [start, stop) of positions whose points are selected."""
    ids: tuple[int, ...] = ()
    """Record ids whose points are selected, in addition to `positions`. If both are empty, the points of all
    positions are selected."""
    upload: str | None = None
    """Name of the upload whose points are selected; None for all points."""

    def __bool__(self) -> bool:
        return bool(self.groups or self.positions or self.ids)


def condition_from_filter(where: Filter, read_ids: Callable[[Condition], Ids]) -> Condition:
    """Convert a filter of records to a condition on points.

    If the filter has groups, the condition selects the groups, because the server has an index of the group
    numbers. Otherwise it selects the filter's ranges of record ids. If the filter allows no record, the
    condition selects nothing.

    Args:
        where: filter with group numbers or ranges of record ids.
        read_ids: function that returns the ids of all stored points that a condition selects.
    """
    if where.groups is not None:
        return Condition(groups=tuple(sorted(where.groups)))
    return condition_from_ranges(where.ids, read_ids)


def condition_from_ranges(ranges: IdRanges, read_ids: Callable[[Condition], Ids]) -> Condition:
    """Convert ranges of record ids to a condition with ranges of positions and single ids.

    A record id encodes a position (the number of a token in the store) and a token. If a range contains all
    ids of a position, the condition selects the position. At its two ends, a range may contain only some ids
    of a position; the condition lists these ids. If there are more than `_LISTED_IDS` of them, `read_ids`
    reads which of them are stored, and the condition lists only these.

    Args:
        ranges: the ranges; no ranges give a condition that selects nothing.
        read_ids: function that returns the ids of all stored points that a condition selects.
    """
    whole = find_whole_positions(ranges)
    rest = ranges - id_ranges_from_positions(whole.starts, whole.stops)
    positions = tuple(whole)
    if rest.size <= _LISTED_IDS:
        return Condition(positions=positions, ids=tuple(rest.ids().tolist()))
    position_ranges = IdRanges(
        np.stack([positions_from_ids(rest.starts), positions_from_ids(rest.stops - 1) + 1], axis=1)
    )
    stored = read_ids(Condition(positions=tuple(position_ranges)))
    return Condition(positions=positions, ids=tuple(stored[rest.contains(stored)].tolist()))


def _to_rest_filter(condition: Condition) -> models.Filter:
    """Convert a condition that selects at least one point to a filter of Qdrant's REST interface."""
    must: list[models.Condition] = []
    if condition.groups:
        match = models.MatchAny(any=list(condition.groups))
        must.append(models.FieldCondition(key=GROUP, match=match))
    if condition.upload is not None:
        must.append(models.FieldCondition(key=UPLOAD, match=models.MatchValue(value=condition.upload)))
    should: list[models.Condition] = [
        models.FieldCondition(key=POSITION, range=models.Range(gte=start, lt=stop))
        for start, stop in condition.positions
    ]
    if condition.ids:
        should.append(models.HasIdCondition(has_id=list(condition.ids)))
    return models.Filter(must=must or None, should=should or None)


def _to_grpc_filter(condition: Condition | None) -> Any:
    """Convert a condition to the gRPC message of a filter; None, which selects all points, stays None."""
    return None if condition is None else RestToGrpc.convert_filter(_to_rest_filter(condition))


def _convert_hits(
    answers: Sequence[Sequence[Any]], k: int, metric: Metric, *, id_attribute: str = "id"
) -> Neighbors:
    """Convert the points that the server has found (hits) to neighbors.

    Qdrant's score is the square root of knnstore's L2 distance, or the inner product.

    Args:
        answers: for each query its hits, nearest first; each hit has an id and a score.
        k: number of neighbors of each query.
        metric: metric of the collection.
        id_attribute: name of the attribute of a hit that is its id; dots lead to nested attributes.

    Returns:
        Record ids and distances, each of shape (q, k), nearest first. If a query has fewer than k hits, each
        missing neighbor has id -1 and distance +inf.
    """
    neighbors = Neighbors.all_missing(len(answers), k)
    for row, hits in enumerate(answers):
        neighbors.ids[row, : len(hits)] = [*map(attrgetter(id_attribute), hits)]
        neighbors.distances[row, : len(hits)] = [hit.score for hit in hits]
    if metric is Metric.L2:
        np.square(neighbors.distances, out=neighbors.distances)
    else:
        np.negative(neighbors.distances, out=neighbors.distances, where=neighbors.ids >= 0)
    return neighbors


class ServerPoints:
    """The points of an open collection, read and written over REST.

    A point is a vector with an id and a payload (named values); each record is a point. A condition selects
    points. In place of a condition, None selects all points. A condition that selects nothing is not allowed.
    A writing method returns when its change is visible. If this is not certain, the method raises an error.

    Args:
        collection: the open collection.
        dim: number of components of a vector.
        metric: metric of the collection.
    """

    exact_search: bool
    """True if every search compares the query with all points."""
    exact_keys: bool
    """True if vectors are stored as float32; False if they are stored as float16."""
    takes_uploads: bool
    """True if the server can insert points without replacing existing points (version 1.16 or later).
    Recognized by `Collection.mark`, because metadata of collections exist since the same version."""

    def __init__(self, collection: Collection, dim: int, metric: Metric) -> None:
        self._collection, self._dim, self._metric = collection, dim, metric
        self._client, self._options, self._name = collection.client, collection.options, collection.name
        self.attempts = collection.attempts
        self.exact_search = collection.options.exact
        self.exact_keys = collection.exact_keys
        self.takes_uploads = collection.mark is not None
        self._senders = ThreadPoolExecutor(collection.options.parallel, thread_name_prefix="qdrant")

    def upsert(self, ids: Ids, keys: Keys, groups: Groups, upload: str | None = None) -> None:
        """Add records to the collection; a new record replaces an older record with the same id.

        With `upload`, an older record with the same id stays. The server's indexing is not postponed then,
        because it is not known which upload is the last, and the store is searched between uploads.

        Several requests are sent at the same time. If a request fails, no further request is sent. The error
        is raised when the running requests have ended; some of the records may be stored then.

        Args:
            ids: record ids, int64, shape (n,).
            keys: vectors, float32, shape (n, dim).
            groups: group number of each record, int32, shape (n,).
            upload: name of the upload, which is stored with each record; None for no upload.

        Raises:
            InvalidVectorError: vectors are stored as float16, and a component is too large; no record is
                added.
        """
        largest = float(np.abs(keys).max(initial=0))
        if largest > _LARGEST and not self.exact_keys:
            raise InvalidVectorError(
                f"a key has a component of {largest:,.0f}, but float16 allows at most {_LARGEST:,.0f}: "
                "choose datatype float32"
            )
        if upload is None:
            self._collection.prepare_upload(len(ids))
        size = min(_BATCH_POINTS, max(1, _BATCH_BYTES // (4 * self._dim)))
        batches = [slice(start, start + size) for start in range(0, len(ids), size)]
        sent = [
            self._senders.submit(self.send, ids[rows], keys[rows], groups[rows], upload) for rows in batches
        ]
        wait(sent, return_when=FIRST_EXCEPTION)
        for future in sent:  # after a failure the waiting requests are not sent
            future.cancel()
        wait(sent)
        for future in sent:
            if not future.cancelled():
                future.result()

    def send(self, ids: Ids, keys: Keys, groups: Groups, upload: str | None) -> None:
        """Add records with a single request, and wait until the server has stored the records.

        Args:
            ids: record ids, int64, shape (n,).
            keys: vectors, float32, shape (n, dim).
            groups: group number of each record, int32, shape (n,).
            upload: name of the upload, which is stored with each record; existing records then stay
                unchanged. None replaces existing records.
        """
        common = {} if upload is None else {UPLOAD: upload}
        batch = models.Batch(
            ids=ids.tolist(),
            vectors=keys.tolist(),
            payloads=[
                {GROUP: group, POSITION: position, **common}
                for group, position in zip(groups.tolist(), positions_from_ids(ids).tolist(), strict=True)
            ],
        )
        update_filter = None if upload is None else _NEVER
        self.attempts.change_points(
            lambda: (
                self._client.upsert(self._name, batch, wait=True, update_filter=update_filter).status.value
            )
        )

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """Find the k nearest points (stored vectors) of each query with a single request.

        Args:
            queries: query vectors, float32, shape (q, dim), q >= 1.
            k: number of neighbors, >= 1.
            condition: points that may be found; None allows all points.
            exact: True compares each query with all points that may be found; False searches the server's
                graph, approximately.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. If fewer than k points are found,
            each missing neighbor has id -1 and distance +inf.
        """
        params = self._make_search_params(k, exact)
        selection = None if condition is None else _to_rest_filter(condition)
        requests = [
            models.QueryRequest(query=query, limit=k, filter=selection, params=params)
            for query in self._clip_to_half(queries).tolist()
        ]
        answers = self.attempts.read(lambda: self._client.query_batch_points(self._name, requests))
        return _convert_hits([answer.points for answer in answers], k, self._metric)

    def delete(self, condition: Condition) -> None:
        """Delete the selected points (stored vectors), and wait until the change is visible.

        Args:
            condition: the points to delete; it must select at least one.
        """
        selector = models.FilterSelector(filter=_to_rest_filter(condition))
        self.attempts.change_points(lambda: self._client.delete(self._name, selector, wait=True).status.value)

    def count(self, condition: Condition | None = None) -> int:
        """Return the exact number of points (stored vectors) that a condition selects; None for all."""
        selection = None if condition is None else _to_rest_filter(condition)
        return self.attempts.read(lambda: self._client.count(self._name, selection, exact=True)).count

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """Read the next points (stored vectors), by ascending id, beginning at an id.

        Args:
            first: smallest id to return.
            limit: number of points to return, >= 1. Fewer points are returned if no more points exist.
            condition: points to return; None returns all points.
            keys: True also returns vectors and group numbers; False returns empty arrays for the vectors and
                the group numbers.

        Returns:
            Record ids int64 (n,), vectors float32 (n, dim), and group numbers int32 (n,).
        """
        selection = None if condition is None else _to_rest_filter(condition)
        records, _ = self.attempts.read(
            lambda: self._client.scroll(
                self._name,
                selection,
                limit,
                offset=first,
                with_payload=keys,
                with_vectors=keys,
            )
        )
        rows: list[Any] = records if keys else []
        return (
            np.array([record.id for record in records], np.int64),
            np.array([record.vector for record in rows], np.float32).reshape(len(rows), self._dim),
            np.array([record.payload[GROUP] for record in rows], np.int32),
        )

    def optimize(self) -> None:
        """Make the server index all points (stored vectors), and wait until all points are indexed."""
        self._collection.build_index()

    def close(self) -> None:
        """Close the connections to the server.

        If the server's indexing was postponed, the server is first told to index again. The method does not
        wait until the index is built.
        """
        self._senders.shutdown()
        try:
            self._collection.resume_indexing()
        finally:
            self._client.close()

    def _clip_to_half(self, queries: Keys) -> Keys:
        """Clip queries to the range of float16 if vectors are stored as float16; else return them."""
        return queries if self.exact_keys else np.clip(queries, -_LARGEST, _LARGEST)

    def _make_search_params(self, k: int, exact: bool) -> models.SearchParams:
        """Return Qdrant's parameters of a search.

        Args:
            k: number of neighbors.
            exact: True compares each query with all points; False searches the graph.
        """
        rescored = models.QuantizationSearchParams(rescore=True, oversampling=self._options.oversampling)
        return models.SearchParams(
            hnsw_ef=max(k, self._options.ef),
            exact=exact,
            quantization=rescored if self._collection.quantized and not exact else None,
        )


def answers_over_grpc(collection: Collection) -> bool:
    """Check whether the server of a collection answers over gRPC.

    The check waits at most 2 seconds. The answer must come from the same server as over REST: a random number
    in the collection's metadata must be the same.

    Args:
        collection: open collection.

    Returns:
        True if the same server answers over gRPC. False if no server or another server answers, or if the
        server keeps no metadata of collections (before version 1.16).
    """
    request: Any = grpc.GetCollectionInfoRequest(collection_name=collection.name)
    timeout = min(_PROBE_SECONDS, collection.options.timeout)
    try:
        answer = collection.client.grpc_collections.Get(request, timeout=timeout)
    except RpcError:
        return False
    mark: str = answer.result.config.metadata[MARK].string_value
    return collection.mark is not None and mark == collection.mark


class GrpcPoints(ServerPoints):
    """The points of an open collection, read and written over gRPC. The methods are those of `ServerPoints`.

    Messages are built from bytes, and answers are read without qdrant-client: with k=1024, creating its
    Python objects takes several times as long as the search.
    """

    def send(self, ids: Ids, keys: Keys, groups: Groups, upload: str | None) -> None:
        """Add records with a single request over gRPC, and wait until the server has stored the records."""
        common = {} if upload is None else {UPLOAD: grpc.Value(string_value=upload)}
        rows = zip(
            ids.tolist(),
            _iterate_vector_messages(keys),
            groups.tolist(),
            positions_from_ids(ids).tolist(),
            strict=True,
        )
        points = [
            grpc.PointStruct(
                id=grpc.PointId(num=number),
                vectors=grpc.Vectors(vector=grpc.Vector(dense=key)),
                payload={
                    GROUP: grpc.Value(integer_value=group),
                    POSITION: grpc.Value(integer_value=position),
                    **common,
                },
            )
            for number, key, group, position in rows
        ]
        update_filter = None if upload is None else RestToGrpc.convert_filter(_NEVER)
        request: Any = grpc.UpsertPoints(
            collection_name=self._name, points=points, wait=True, update_filter=update_filter
        )
        self.attempts.change_points(lambda: _read_status(self._send_request("Upsert", request)))

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """Find the k nearest points of each query with a single request over gRPC."""
        shared: dict[str, Any] = {
            "collection_name": self._name,
            "limit": k,
            "params": RestToGrpc.convert_search_params(self._make_search_params(k, exact)),
            "filter": _to_grpc_filter(condition),
            "with_payload": grpc.WithPayloadSelector(enable=False),
        }
        request: Any = grpc.QueryBatchPoints(
            collection_name=self._name,
            query_points=[
                grpc.QueryPoints(query=grpc.Query(nearest=grpc.VectorInput(dense=query)), **shared)
                for query in _iterate_vector_messages(self._clip_to_half(queries))
            ],
        )
        answer = self.attempts.read(lambda: self._send_request("QueryBatch", request))
        if len(answer.result) != len(queries):
            raise DatastoreError(
                f"{self.attempts.place} answered {len(answer.result)} of {len(queries)} queries"
            )
        hits = [batch.result for batch in answer.result]
        return _convert_hits(hits, k, self._metric, id_attribute="id.num")

    def delete(self, condition: Condition) -> None:
        """Delete the selected points over gRPC, and wait until the change is visible."""
        selector = grpc.PointsSelector(filter=_to_grpc_filter(condition))
        request: Any = grpc.DeletePoints(collection_name=self._name, points=selector, wait=True)
        self.attempts.change_points(lambda: _read_status(self._send_request("Delete", request)))

    def count(self, condition: Condition | None = None) -> int:
        """Return the exact number of points that a condition selects; None for all."""
        selection = _to_grpc_filter(condition)
        request: Any = grpc.CountPoints(collection_name=self._name, filter=selection, exact=True)
        return int(self.attempts.read(lambda: self._send_request("Count", request)).result.count)

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """Read the next points over gRPC, by ascending id, beginning at an id."""
        request: Any = grpc.ScrollPoints(
            collection_name=self._name,
            offset=grpc.PointId(num=first),
            limit=limit,
            filter=_to_grpc_filter(condition),
            with_payload=grpc.WithPayloadSelector(enable=keys),
            with_vectors=grpc.WithVectorsSelector(enable=keys),
        )
        answer = self.attempts.read(lambda: self._send_request("Scroll", request))
        ids = np.array([point.id.num for point in answer.result], np.int64)
        points = answer.result if keys else []
        vectors = np.empty((len(points), self._dim), np.float32)
        for row, point in enumerate(points):
            vector = point.vectors.vector
            vectors[row] = vector.dense.data or vector.data  # servers before 1.16 use the second field
        groups = [point.payload[GROUP].integer_value for point in points]
        return ids, vectors, np.array(groups, np.int32)

    def _send_request(self, method: str, request: Any) -> Any:
        """Call a gRPC method of the server by its name, and return the answer.

        The timeout is the time that `Attempts` leaves for the current call.
        """
        return getattr(self._client.grpc_points, method)(request, timeout=self.attempts.seconds_left())


def _read_status(answer: Any) -> str:
    """Return the status of a change from a gRPC answer, in lower case, such as "completed"."""
    return str(grpc.UpdateStatus.Name(answer.result.status)).lower()


def _iterate_vector_messages(vectors: Keys) -> Iterator[Any]:
    """Convert each vector to a gRPC message, and yield the messages in the order of the vectors.

    The messages are parsed from bytes, because this is faster than passing a list of floats.

    Args:
        vectors: float32, shape (n, dim).
    """
    message: Any = grpc.DenseVector
    dim = vectors.shape[1]
    serialized: bytes = message(data=[0.0] * dim).SerializeToString()
    prefix = serialized[: len(serialized) - 4 * dim]  # the bytes before the floats
    for vector in vectors.astype("<f4", copy=False):
        yield message.FromString(prefix + vector.tobytes())
