"""ASGI middleware that every request passes: its id, authentication, limits, metrics, and log line."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from knnstore.server.access import Access, Gate
from knnstore.server.errors import ApiError, convert_to_api_error

_logger = logging.getLogger("knnstore.server.requests")

_LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[\w.-]{1,64}")

_MAX_MESSAGE_BYTES = 1 << 16
"""Largest number of bytes of an answer that are passed to the HTTP server at once."""

RecordRequest = Callable[[str, int, float, float | None], None]
"""Function that records an answered request: its declared path, status, seconds, and seconds to the first
byte."""


class Frame:
    """ASGI middleware: checks and limits each request, passes it to the application, and logs it.

    Args:
        app: the application that answers the requests.
        gate: object that finds the permissions of each client by its API key.
        open_paths: paths that need no key.
        paths: all paths without parameters. A trailing slash after one of these paths is ignored.
        body_bytes: largest size of a request's body in bytes.
        body_seconds: seconds in which the whole body must arrive.
        local_only: True if only requests whose Host header names this machine are answered. Otherwise a web
            page in a browser on this machine could reach the server through a host name of its own (DNS
            rebinding).
        count: function that is called after each request. Its arguments are the declared path, the status,
            the seconds until the end of the answer, and the seconds until its first byte (None if the answer
            has no body).
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: Gate,
        open_paths: frozenset[str],
        paths: frozenset[str],
        body_bytes: int,
        body_seconds: float,
        *,
        local_only: bool,
        count: RecordRequest,
    ) -> None:
        self._app = app
        self._gate = gate
        self._open = open_paths
        self._paths = paths
        self._body_bytes = body_bytes
        self._body_seconds = body_seconds
        self._local_only = local_only
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request, and count and log it.

        An error before the answer has begun is sent as a JSON error. After that, an error only ends the
        answer. ASGI messages that are not HTTP requests, such as lifespan, go to the application unchanged.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # 1) Normalize the path, and choose the id of the request.
        if scope["path"].rstrip("/") in self._paths:
            scope["path"] = scope["path"].rstrip("/")
        headers, started = Headers(scope=scope), time.perf_counter()
        given_id = headers.get("x-request-id", "")
        id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        record: dict[str, Any] = {"status": 500, "begun": False, "first": None, "key": ""}

        async def send_answer(message: Message) -> None:
            """Send a part of the answer to the client. Records the status and the time of the first byte."""
            if message["type"] == "http.response.start":
                record["begun"], record["status"] = True, message["status"]
                MutableHeaders(scope=message)["x-request-id"] = id
            elif record["first"] is None and message.get("body"):
                record["first"] = time.perf_counter() - started
            for part in _split_message(message):
                await send(part)  # waits until the client has read enough earlier parts

        # 2) Authenticate the client, and let the application answer.
        try:
            who = await self._authenticate(scope, headers)
            scope.setdefault("state", {})["access"] = who
            record["key"] = who.key if who else ""
            limited_receive = self._wrap_with_limits(headers, receive)
            with who.quota.count_running() if who else nullcontext():
                await self._app(scope, limited_receive, send_answer)
        except ApiError as error:
            await _error_response(error)(scope, receive, send_answer)
        except Exception as error:
            if not record["begun"]:
                await _error_response(convert_to_api_error(error))(scope, receive, send_answer)
            _logger.debug("request %s failed", id, exc_info=error)  # the application has logged the error
        # 3) Count the request, and write the log line.
        finally:
            seconds = time.perf_counter() - started
            endpoint = getattr(scope.get("route"), "path", "(none)")
            self._count(endpoint, record["status"], seconds, record["first"])
            _logger.info(
                "%s %s %d %.3f s",
                scope["method"],
                endpoint,
                record["status"],
                seconds,
                extra={
                    "request": {
                        "id": id,
                        "method": scope["method"],
                        "endpoint": endpoint,
                        "status": record["status"],
                        "seconds": round(seconds, 6),
                        "key": record["key"],
                    }
                },
            )

    async def _authenticate(self, scope: Scope, headers: Headers) -> Access | None:
        """Return the permissions of a request's client; None if the path is open to requests without a key.

        Raises:
            ApiError: 403 if only requests for this machine are answered and the Host header names another
                machine; 401 if the key is missing or wrong.
        """
        if self._local_only and not _LOCAL_HOST.fullmatch(headers.get("host", "")):
            raise ApiError(
                403, "this server accepts requests of this machine only: call it by the name localhost"
            )
        if scope["path"] in self._open:
            return None
        return await self._gate.authenticate_request(headers.get("authorization", ""))

    def _wrap_with_limits(self, headers: Headers, receive: Receive) -> Receive:
        """Return an ASGI function `receive` that limits the size and the arrival time of the request's body.

        The returned function raises HTTPException 413 if the body is too large, 408 if it arrives too slowly.

        Args:
            headers: the headers of the request.
            receive: the function that receives parts of the request.

        Raises:
            ApiError: 413 if the header Content-Length is larger than the limit or is not a number.
        """
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._body_bytes:
            raise self._body_too_large_error()
        byte_count, is_whole, deadline = 0, False, asyncio.get_running_loop().time() + self._body_seconds

        async def receive_limited() -> Message:
            """Receive the next part of the body."""
            nonlocal byte_count, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else deadline):
                    message = await receive()
            except TimeoutError as error:
                message_text = f"the request did not arrive within {self._body_seconds:g} seconds"
                raise HTTPException(408, message_text) from error
            is_whole = not message.get("more_body", False)
            byte_count += len(message.get("body", b""))
            if byte_count > self._body_bytes:
                raise HTTPException(413, str(self._body_too_large_error()))
            return message

        return receive_limited

    def _body_too_large_error(self) -> ApiError:
        """Return, but do not raise, the error 413 for a body that is too large."""
        return ApiError(413, f"the request is larger than {self._body_bytes:,} bytes", code="too_large")


def _split_message(message: Message) -> Iterator[Message]:
    """Yield an ASGI message, split into messages with at most `_MAX_MESSAGE_BYTES` bytes of body.

    A part is copied only when it is sent, so memory is used only for what the client reads.
    """
    body = message.get("body", b"")
    if len(body) <= _MAX_MESSAGE_BYTES:
        yield message
        return
    whole = memoryview(body)
    for start in range(0, len(body), _MAX_MESSAGE_BYTES):
        end = start + _MAX_MESSAGE_BYTES
        more = end < len(body) or message.get("more_body", False)
        yield {**message, "body": bytes(whole[start:end]), "more_body": more}


def _error_response(error: ApiError) -> JSONResponse:
    """Return the HTTP response of an error, with a JSON body."""
    return JSONResponse(error.body, error.status, error.headers)
