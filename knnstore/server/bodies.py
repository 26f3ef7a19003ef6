"""Parsing and validation of request bodies, in worker threads. Bodies with too many values are refused first.

Python's JSON parser and pydantic hold the global interpreter lock while they work. Their time depends on the
number of values more than on the number of bytes. So the values are counted before the body is parsed.
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
"""Largest number of values in all lists and objects of a body together."""
MOST_CONTAINERS = 50_000
"""Largest number of lists and objects in a body."""
MOST_MEMBERS = 100_000
"""Largest number of fields in all objects of a body together."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)


class BodyRoute(APIRoute):
    """A route of FastAPI that parses and validates the JSON body of a request in a worker thread.

    Only bodies whose type is a pydantic model are treated in this way.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the coroutine function that answers a request of this route.

        If the route has no body, or the body's type is not a pydantic model, this is FastAPI's own function.
        """
        handler = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return handler

        async def parse_and_handle(request: Request) -> Response:
            """Check the client's right, parse the body, and call the endpoint. Returns its response."""
            # Check the rights first: the body of a client without the right is not read.
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

        return parse_and_handle


class _ParsedRequest(Request):
    """A request whose method `json` returns the validated pydantic model, not plain JSON values.

    Args:
        request: the request.
        model: the pydantic class of the body.
    """

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self.error: Exception | None = None
        """The error that `json` raised; None if it raised none. FastAPI replaces the error by a general one,
        so it is kept here."""

    async def json(self) -> Any:
        """Parse the body in a worker thread, and return it as the validated pydantic model.

        An error is raised, and also stored in `error`.
        """
        try:
            return await run_in_threadpool(parse_body, await self.body(), self._model)
        except (RequestValidationError, ApiError) as error:
            self.error = error
            raise


def parse_body(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse a JSON body, and return it as the validated pydantic model.

    Args:
        body: the bytes of the body.
        model: the pydantic class of the body.

    Raises:
        json.JSONDecodeError: if the body is not JSON.
        ApiError: 400 if the body has too many values.
        RequestValidationError: if the body does not match the class; it contains the first error only.
    """
    _check_number_of_values(body)
    values = json.loads(body)
    try:
        return model.model_validate(values, from_attributes=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise RequestValidationError([{**first, "loc": ("body", *first["loc"])}]) from error


def _check_number_of_values(body: bytes) -> None:
    """Check, without parsing a JSON body, that it does not have too many values.

    Counts commas, opening brackets and braces, and colons. Characters inside strings do not count.

    Raises:
        ApiError: 400 if the number of values, of lists and objects, or of fields exceeds its own limit.
    """
    # 1) Count quickly; this also counts characters inside strings.
    counts = {byte: body.count(byte) for byte in (b",", b"[", b"{", b":")}
    if not _describe_exceeded_limit(counts):
        return
    # 2) Count again without the strings.
    bare = _STRING.sub(b"", body)
    too_many = _describe_exceeded_limit({byte: bare.count(byte) for byte in counts})
    if too_many:
        raise ApiError(400, f"the body has more than {too_many}")


def _describe_exceeded_limit(counts: dict[bytes, int]) -> str:
    """Return the first exceeded limit as text, for example "50,000 lists and objects"; else an empty string.

    Args:
        counts: number of commas, opening brackets, opening braces and colons in a body, by character.
    """
    containers = counts[b"["] + counts[b"{"]
    if containers > MOST_CONTAINERS:
        return f"{MOST_CONTAINERS:,} lists and objects"
    if counts[b":"] > MOST_MEMBERS:
        return f"{MOST_MEMBERS:,} fields"
    if containers + counts[b","] > MOST_VALUES:
        return f"{MOST_VALUES:,} values"
    return ""
