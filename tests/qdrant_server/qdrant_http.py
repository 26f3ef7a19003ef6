"""Qdrant's REST API over an engine, as far as this project's use of the client needs it."""

import json
import select
import socket
import struct
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import qdrant_edge as edge
from pydantic import BaseModel, TypeAdapter, ValidationError
from qdrant_client.http import models
from qdrant_engine import Engine
from qdrant_faults import ApiError, ConnectionLost, Faults

VERSION = {"title": "qdrant - vector search engine", "version": "1.20.0", "commit": "0" * 40}
MAX_BODY = 32 << 20
"""Bytes that a request's body may have: the real server's default."""

_RESET = struct.pack("ii", 1, 0)
Call = tuple[str, Callable[[], Any]]


class HttpServer(ThreadingHTTPServer):
    """Listens; one thread for each connection."""

    daemon_threads = True
    disable_nagle_algorithm = True

    def __init__(self, port: int, engine: Engine, faults: Faults, api_key: str | None) -> None:
        self.engine, self.faults, self.api_key = engine, faults, api_key
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and remember it, so that it ends with the server."""
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    @property
    def has_abandoned_requests(self) -> bool:
        """Whether a client closed a connection, or opened one, that its thread has not dealt with yet."""
        return bool(select.select([self.socket], [], [], 0)[0]) or any(map(_is_unread, [*self._open]))

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the listening socket and every connection."""
        super().server_close()
        for connection in [*self._open]:
            reset(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


def reset(connection: socket.socket) -> None:
    """End a connection as a crash would: what is still to be sent is dropped."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.shutdown(socket.SHUT_RD)
        connection.close()
    except OSError:
        pass  # it ended by itself


def _is_unread(connection: socket.socket) -> bool:
    """Whether the client of a connection has sent something, or closed it, that was not read yet."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False  # nothing was sent, or the server closed it
    return True


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urlsplit(self.path)
        path = [unquote(part) for part in address.path.split("/") if part]
        wait = parse_qs(address.query).get("wait") == ["true"]
        try:
            self._send(200, self._answer(path, body, wait))
        except ConnectionLost as lost:
            self.close_connection = True
            if lost.answer is None:
                reset(self.connection)
            else:
                self._send(200, _envelope(lost.answer), cut=True)
        except ApiError as error:
            headers = {} if error.retry_after is None else {"Retry-After": str(round(error.retry_after))}
            self._send(error.status, {"status": {"error": str(error)}, "time": 0.0}, headers)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _handle

    def _answer(self, path: list[str], body: bytes, wait: bool) -> Any:
        if path == ["faults"]:
            return self._control(body)
        if path in (["healthz"], ["livez"], ["readyz"]):
            return "healthz check passed"
        if self.server.api_key not in (None, self.headers.get("api-key")):
            raise ApiError(401, "Must provide an API key or an Authorization bearer token")
        if len(body) > MAX_BODY:
            raise ApiError(413, f"JSON payload ({len(body)} bytes) is larger than allowed")
        if not path:
            return self.server.faults.answer("rest", "info", lambda: VERSION)
        try:
            endpoint, work = self._collections(path[1:], body) or self._points(path[1:], body, wait)
        except ValidationError as error:
            raise ApiError(400, f"Format error in JSON body: {error}") from error
        return _envelope(self.server.faults.answer("rest", endpoint, lambda: translated(work)))

    def _control(self, body: bytes) -> Any:
        """The endpoint of the tests: PUT a fault, DELETE all, GET how often each endpoint was called."""
        faults = self.server.faults
        if self.command == "PUT":
            faults.add(**json.loads(body))
        elif self.command == "DELETE":
            faults.clear()
        return faults.counted()

    def _collections(self, path: list[str], body: bytes) -> Call | None:
        engine = self.server.engine
        match self.command, path:
            case "GET", []:
                return "get_collections", engine.get_collections
            case "GET", [name]:
                return "get_collection", lambda: engine.info(name)
            case "GET", [name, "exists"]:
                return "collection_exists", lambda: engine.exists(name)
            case "PUT", [name]:
                create = models.CreateCollection.model_validate_json(body)
                return "create_collection", lambda: engine.create_collection(name, create)
            case "PATCH", [name]:
                update = models.UpdateCollection.model_validate_json(body)
                return "update_collection", lambda: engine.update_collection(name, update)
            case "DELETE", [name]:
                return "delete_collection", lambda: engine.delete_collection(name)
        return None

    def _points(self, path: list[str], body: bytes, wait: bool) -> Call:
        engine = self.server.engine
        match self.command, path:
            case "PUT", [name, "index"]:
                index = models.CreateFieldIndex.model_validate_json(body)
                field, schema = index.field_name, index.field_schema
                return "create_payload_index", lambda: engine.create_index(name, field, schema, wait=wait)
            case "PUT", [name, "points"]:
                insert = TypeAdapter(models.PointInsertOperations).validate_json(body)
                points, where = _points_of(insert), insert.update_filter
                return "upsert", lambda: engine.upsert(name, points, where=where, wait=wait)
            case "POST", [name, "points", "delete"]:
                selector = TypeAdapter(models.PointsSelector).validate_json(body)
                return "delete", lambda: engine.delete(name, selector, wait=wait)
            case "POST", [name, "points"]:
                chosen = models.PointRequest.model_validate_json(body)
                return "retrieve", lambda: _plain(engine.retrieve(name, chosen))
            case "POST", [name, "points", "query"]:
                query = models.QueryRequest.model_validate_json(body)
                return "query", lambda: {"points": _plain(engine.query(name, query))}
            case "POST", [name, "points", "query", "batch"]:
                batch = models.QueryRequestBatch.model_validate_json(body).searches
                return "query", lambda: [{"points": _plain(engine.query(name, each))} for each in batch]
            case "POST", [name, "points", "scroll"]:
                request = models.ScrollRequest.model_validate_json(body)
                return "scroll", lambda: _page(*engine.scroll(name, request))
            case "POST", [name, "points", "count"]:
                counted = models.CountRequest.model_validate_json(body).filter
                return "count", lambda: engine.count(name, counted)
        raise ApiError(404, f"this test server does not know {self.command} {self.path}")

    def _send(
        self, status: int, content: Any, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        text = isinstance(content, str)
        body = content.encode() if text else json.dumps(content, default=_model).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def translated(work: Callable[[], Any]) -> Any:
    """Do the work of a call; what the engine does not accept is the caller's mistake."""
    try:
        return work()
    except ApiError:
        raise
    except Exception as error:
        wrong_input = isinstance(error, TypeError) or "dimension" in str(error)
        raise ApiError(400 if wrong_input else 500, f"{'Wrong input: ' * wrong_input}{error}") from error


def _points_of(operations: models.PointInsertOperations) -> list[models.PointStruct]:
    if isinstance(operations, models.PointsList):
        return operations.points
    batch = operations.batch
    payloads = batch.payloads or [None] * len(batch.ids)
    return [
        models.PointStruct(id=id, vector=vector, payload=payload)
        for id, vector, payload in zip(batch.ids, batch.vectors, payloads, strict=True)
    ]


def _plain(points: list[edge.ScoredPoint] | list[edge.Record]) -> list[dict[str, Any]]:
    rows = []
    for point in points:
        row = {"id": point.id if isinstance(point.id, int) else str(point.id)}
        if isinstance(point, edge.ScoredPoint):
            row |= {"score": point.score, "version": point.version}
        rows.append(row | {"payload": point.payload, "vector": point.vector})
    return rows


def _page(points: list[edge.Record], following: Any) -> dict[str, Any]:
    return {"points": _plain(points), "next_page_offset": following}


def _envelope(result: Any) -> dict[str, Any]:
    return {"result": result, "status": "ok", "time": 0.0}


def _model(model: BaseModel) -> Any:
    return model.model_dump(mode="json", exclude_none=True)
