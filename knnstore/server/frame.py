"""ASGI middleware for every request: its id, authentication, size and time limits, metrics, and log line."""

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
from knnstore.server.errors import ApiError, error_of

_logger = logging.getLogger("knnstore.server.requests")

_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[\w.-]{1,64}")

_PART_BYTES = 1 << 16
"""Largest part of an answer that is passed to the server at once, in bytes."""

Count = Callable[[str, int, float, float | None], None]


class Frame:
    """An ASGI application that wraps another one.

    Args:
        app: the application that answers.
        gate: authenticates the requests.
        open_paths: paths that need no key.
        paths: the paths without parameters. A trailing slash is removed from them.
        body_bytes: largest size of a request's body in bytes.
        body_seconds: seconds in which the body must arrive.
        local_only: True if only requests whose Host header names this machine are answered. Otherwise a web
            page in a browser on this machine could reach the server through a host name of its own (DNS
            rebinding).
        count: called after each request with endpoint, status, seconds, and seconds to the first byte.
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
        count: Count,
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
        """Answer one request. Other ASGI scopes, such as lifespan, go to the wrapped application unchanged.

        An error before the answer has begun is sent as a JSON error. Each request is counted and logged.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].rstrip("/") in self._paths:
            scope["path"] = scope["path"].rstrip("/")
        headers, started = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        seen: dict[str, Any] = {"status": 500, "begun": False, "first": None, "key": ""}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["begun"], seen["status"] = True, message["status"]
                MutableHeaders(scope=message)["x-request-id"] = id
            elif seen["first"] is None and message.get("body"):
                seen["first"] = time.perf_counter() - started
            for part in _parts(message):  # `send` waits until the client has read enough earlier parts
                await send(part)

        try:
            who = await self._checked(scope, headers)
            scope.setdefault("state", {})["access"] = who
            seen["key"] = who.key if who else ""
            limited = self._limited(headers, receive)
            with who.quota.count_running() if who else nullcontext():
                await self._app(scope, limited, answer)
        except ApiError as error:
            await _error(error)(scope, receive, answer)
        except Exception as error:
            if not seen["begun"]:
                await _error(error_of(error))(scope, receive, answer)
            _logger.debug("request %s failed", id, exc_info=error)  # the application has logged the error
        finally:
            seconds = time.perf_counter() - started
            endpoint = getattr(scope.get("route"), "path", "(none)")
            self._count(endpoint, seen["status"], seconds, seen["first"])
            _logger.info(
                "%s %s %d %.3f s",
                scope["method"],
                endpoint,
                seen["status"],
                seconds,
                extra={
                    "request": {
                        "id": id,
                        "method": scope["method"],
                        "endpoint": endpoint,
                        "status": seen["status"],
                        "seconds": round(seconds, 6),
                        "key": seen["key"],
                    }
                },
            )

    async def _checked(self, scope: Scope, headers: Headers) -> Access | None:
        """Authenticate a request. Returns None for an open path.

        Raises:
            ApiError: 403 if the Host header is not local but must be, 401 if the key is missing or wrong.
        """
        if self._local_only and not _LOCAL.fullmatch(headers.get("host", "")):
            raise ApiError(403, "this server is for this machine alone: call it by the name localhost")
        if scope["path"] in self._open:
            return None
        return await self._gate.authenticate_request(headers.get("authorization", ""))

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """Wrap `receive` so that it enforces the size and time limits of the body.

        Raises:
            ApiError: 413 if the header content-length exceeds the limit. The wrapper raises HTTPException 413
                or 408.
        """
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._body_bytes:
            raise self._too_large()
        taken, is_whole, until = 0, False, asyncio.get_running_loop().time() + self._body_seconds

        async def limited() -> Message:
            nonlocal taken, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else until):
                    message = await receive()
            except TimeoutError as error:
                said = f"the request has not come within {self._body_seconds:g} seconds"
                raise HTTPException(408, said) from error
            is_whole = not message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > self._body_bytes:
                raise HTTPException(413, str(self._too_large()))
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request is larger than {self._body_bytes:,} bytes", code="too_large")


def _parts(message: Message) -> Iterator[Message]:
    """Split a large part of an answer into small ones, so that no more is copied than the client reads."""
    body = message.get("body", b"")
    if len(body) <= _PART_BYTES:
        yield message
        return
    whole = memoryview(body)
    for start in range(0, len(body), _PART_BYTES):
        end = start + _PART_BYTES
        more = end < len(body) or message.get("more_body", False)
        yield {**message, "body": bytes(whole[start:end]), "more_body": more}


def _error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)
