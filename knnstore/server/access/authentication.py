"""Authentication and authorization: API keys, the right that each endpoint needs, and the visible domains.

`Gate` finds the `Access` of a request. `Endpoints` declares endpoints with their rights. The functions at the
end list paths and methods of an application, and check its declarations.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from knnstore.catalog import AccessKey, AccessKeys, Right
from knnstore.server.access.quotas import UNLIMITED, Quota
from knnstore.server.errors import ApiError

_PREFIX = "Bearer "
_RIGHT, _NONE = "x-knnstore-right", "none"  # field of each endpoint's OpenAPI description, and its value


@dataclass(frozen=True, slots=True)
class Access:
    """Permissions of the client that sent a request."""

    rights: frozenset[Right]
    domains: frozenset[str] | None = None
    """Visible domains; None means all domains, also those created later."""
    key: str = ""
    """Public id of the API key, for the log; empty without a key."""
    quota: Quota = UNLIMITED
    """Rate limits of the key."""

    @property
    def sees_all(self) -> bool:
        """True if all domains are visible."""
        return self.domains is None

    def sees(self, domain: str) -> bool:
        """Check whether a domain is visible. The domain need not exist."""
        return self.domains is None or domain in self.domains

    def seen(self, domains: Iterable[str]) -> list[str]:
        """Return the visible domains among `domains`, in their order."""
        return [domain for domain in domains if self.sees(domain)]

    def check(self, right: Right) -> None:
        """Check that the client has a right.

        Raises:
            ApiError: 403 if it has not.
        """
        if right not in self.rights:
            raise ApiError(403, f"this key lacks the right {right.value!r}", code="missing_right")


EVERYBODY = Access(frozenset(Right))
"""Permissions of clients without a key, on a server that needs none."""


class Gate:
    """Authenticates requests.

    Args:
        keys: the API keys of the store.
        required: True if each request needs a key. Otherwise a key is checked only if a request has one.
    """

    def __init__(self, keys: AccessKeys, *, required: bool) -> None:
        self._keys = keys
        self._required = required
        self._quotas: dict[str, Quota] = {}

    async def access_of(self, authorization: str) -> Access:
        """Return the permissions that a header ``Authorization`` gives.

        If no key is required, a value that does not have the form of a key gives all rights, because clients
        send arbitrary placeholders. A key is looked up in another thread: the event loop does not wait.

        Raises:
            ApiError: 401 if the key is missing, unknown or expired. The message does not say which.
        """
        given = authorization.removeprefix(_PREFIX).strip() if authorization.startswith(_PREFIX) else ""
        if not self._required and not AccessKeys.has_key_format(given):
            return EVERYBODY
        key = await run_in_threadpool(self._keys.find, given)
        if key is None:
            raise ApiError(
                401,
                "a valid key is needed: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        rights = frozenset(Right) if Right.ADMIN in key.rights else key.rights
        domains = None if key.domains is None else frozenset(key.domains)
        return Access(rights, domains, key.id, self._quota_of(key))

    def forget(self) -> None:
        """Reset the rate limits of all keys: nothing counts as used any more."""
        self._quotas.clear()

    def _quota_of(self, key: AccessKey) -> Quota:
        """Return the quota of a key. It is created at the key's first request and kept until `forget`."""
        if key.requests is None and key.tokens is None:
            return UNLIMITED
        return self._quotas.setdefault(key.id, Quota(key.requests, key.tokens))


class Endpoints:
    """Adds endpoints to an application, each with the right that it needs."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def add(
        self, method: str, path: str, right: Right | None, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a function as an endpoint. A GET endpoint also answers HEAD.

        Args:
            method: the HTTP method.
            path: the path, with parameters in braces.
            right: the right that a request needs; None if it needs neither a right nor a key.
            options: passed on to FastAPI.
        """

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            dependencies = [] if right is None else [Depends(_Needs(right))]
            extra = {_RIGHT: right.value if right else _NONE}
            answer = function if iscoroutinefunction(function) else _as_json(function)
            self._app.add_api_route(
                path, answer, methods=[method], dependencies=dependencies, openapi_extra=extra, **options
            )
            if method == "GET":  # load balancers send HEAD; the HTTP server leaves the body out
                hidden = {**options, "include_in_schema": False}
                self._app.add_api_route(
                    path, function, methods=["HEAD"], dependencies=dependencies, openapi_extra=extra, **hidden
                )
            return function

        return declare


def _as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a synchronous endpoint so that the worker thread, not the event loop, makes JSON of its result."""

    @wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Response:
        result = function(*args, **kwargs)
        return result if isinstance(result, Response) else JSONResponse(result)

    return answer


class _Needs:
    """FastAPI dependency that refuses requests without a right with 403."""

    def __init__(self, right: Right) -> None:
        self.right = right

    # A coroutine, because FastAPI would call a plain function in a worker thread.
    async def __call__(self, request: Request) -> None:
        access(request).check(self.right)


def access(request: Request) -> Access:
    """Return the permissions of a request, which `Frame` has stored in its state."""
    permissions: Access = request.state.access
    return permissions


def open_paths(app: FastAPI) -> frozenset[str]:
    """Return the paths that need no right and therefore no key."""
    return frozenset(
        route.path for route in app.routes if isinstance(route, APIRoute) and _right_of(route) == _NONE
    )


def whole_paths(app: FastAPI) -> frozenset[str]:
    """Return the paths without parameters."""
    return frozenset(
        route.path for route in app.routes if isinstance(route, APIRoute) and "{" not in route.path
    )


def methods_of(app: FastAPI, path: str) -> list[str]:
    """Return the HTTP methods of a path, sorted, OPTIONS included; empty if no endpoint has this path."""
    found = {
        method
        for route in app.routes
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }
    return sorted({*found, "OPTIONS"}) if found else []


def check_declared(app: FastAPI) -> None:
    """Check that each route of an application declares its right.

    Raises:
        RuntimeError: if a route does not; names its path.
    """
    for route in app.routes:
        if not isinstance(route, APIRoute) or _right_of(route) is None:
            raise RuntimeError(f"{getattr(route, 'path', route)} does not declare the right that it needs")


def _right_of(route: APIRoute) -> Any:
    return (route.openapi_extra or {}).get(_RIGHT)
