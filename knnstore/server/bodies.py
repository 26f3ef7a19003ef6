"""Bodies of requests are parsed and validated in other threads, and refused first where that would take long.

Python's JSON parser and pydantic hold the interpreter while they work. How long that takes depends on the
number of values more than on bytes, so values are counted before anything is parsed.
"""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from knnstore.server.errors import ApiError

MOST_VALUES = 500_000
"""Of all lists and objects of a body together."""
MOST_CONTAINERS = 50_000
"""Lists and objects."""
MOST_MEMBERS = 100_000
"""Names of objects."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)


class BodyRoute(APIRoute):
    """A route whose body, if it is JSON for a model, does not pass through the event loop's thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Make what answers a request."""
        handler = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return handler

        async def handle(request: Request) -> Response:
            # The body of a client that lacks the right is not read.
            for needed in self.dependencies:
                assert needed.dependency is not None
                await needed.dependency(request)
            parsed = _ParsedRequest(request, model)
            try:
                return await handler(parsed)
            except HTTPException as error:
                if parsed.error is None:
                    raise
                raise parsed.error from error

        return handle


class _ParsedRequest(Request):
    """A request whose `json` is the model itself."""

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self.error: Exception | None = None
        """What is wrong with the body; FastAPI would say no more than that something is."""

    async def json(self) -> Any:
        """Parse and validate the body."""
        try:
            return await run_in_threadpool(parse_body, await self.body(), self._model)
        except (RequestValidationError, ApiError) as error:
            self.error = error
            raise


def parse_body(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse a body and validate it.

    Raises:
        json.JSONDecodeError: it is not JSON.
        ApiError: 400 where it has too many values.
        RequestValidationError: it is not what the model says; names the first fault.
    """
    _check_size(body)
    given = json.loads(body)
    try:
        return model.model_validate(given, from_attributes=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise RequestValidationError([{**first, "loc": ("body", *first["loc"])}]) from error


def _check_size(body: bytes) -> None:
    counts = {byte: body.count(byte) for byte in (b",", b"[", b"{", b":")}  # of strings as well
    if not _too_many(counts):
        return
    bare = _STRING.sub(b"", body)
    too_many = _too_many({byte: bare.count(byte) for byte in counts})
    if too_many:
        raise ApiError(400, f"the body has more than {too_many}")


def _too_many(counts: dict[bytes, int]) -> str:
    containers = counts[b"["] + counts[b"{"]
    if containers > MOST_CONTAINERS:
        return f"{MOST_CONTAINERS:,} lists and objects"
    if counts[b":"] > MOST_MEMBERS:
        return f"{MOST_MEMBERS:,} fields"
    if containers + counts[b","] > MOST_VALUES:
        return f"{MOST_VALUES:,} values"
    return ""
