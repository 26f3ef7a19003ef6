"""Who may do what: keys, the rights that each endpoint asks for, and what a key sees."""

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
_RIGHT, _NONE = "x-knnstore-right", "none"  # in the description of each endpoint


@dataclass(frozen=True, slots=True)
class Access:
    """What whoever sent a request may do."""

    rights: frozenset[Right]
    domains: frozenset[str] | None = None
    """The domains that there are for it; None is all, those included that are still to come."""
    key: str = ""
    """The key's public name, for the log."""
    quota: Quota = UNLIMITED
    """How much of it."""

    @property
    def sees_all(self) -> bool:
        """Whether the whole store is there for it."""
        return self.domains is None

    def sees(self, domain: str) -> bool:
        """Whether there may be such a domain for it."""
        return self.domains is None or domain in self.domains

    def seen(self, domains: Iterable[str]) -> list[str]:
        """Those of some domains that it sees."""
        return [domain for domain in domains if self.sees(domain)]

    def check(self, right: Right) -> None:
        """Refuse what needs another right.

        Raises:
            ApiError: 403.
        """
        if right not in self.rights:
            raise ApiError(403, f"this key lacks the right {right.value!r}", code="missing_right")


EVERYBODY = Access(frozenset(Right))
"""Whoever reaches a server that asks for no key."""


class Gate:
    """Tells what a request may do.

    Args:
        keys: those of the store.
        required: whether a key must be given. Otherwise one is heeded where it is given.
    """

    def __init__(self, keys: AccessKeys, *, required: bool) -> None:
        self._keys = keys
        self._required = required
        self._quotas: dict[str, Quota] = {}

    async def access_of(self, authorization: str) -> Access:
        """What the header ``Authorization`` allows; only a key is looked up in another thread.

        Raises:
            ApiError: 401, which does not say what is wrong with a key.
        """
        given = authorization.removeprefix(_PREFIX).strip() if authorization.startswith(_PREFIX) else ""
        if not self._required and not AccessKeys.is_one(given):
            return EVERYBODY  # clients send anything where no key is needed
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
        """Count anew what each key has used of its limits."""
        self._quotas.clear()

    def _quota_of(self, key: AccessKey) -> Quota:
        """What is left to a key, counted since its first request here."""
        if key.requests is None and key.tokens is None:
            return UNLIMITED
        return self._quotas.setdefault(key.id, Quota(key.requests, key.tokens))


class Endpoints:
    """Declares the endpoints of an application, none without the right that it needs."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def add(
        self, method: str, path: str, right: Right | None, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare an endpoint, a decorator; None is a right that everybody has.

        An endpoint for GET also answers HEAD.
        """

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            dependencies = [] if right is None else [Depends(_Needs(right))]
            extra = {_RIGHT: right.value if right else _NONE}
            answer = function if iscoroutinefunction(function) else _as_json(function)
            self._app.add_api_route(
                path, answer, methods=[method], dependencies=dependencies, openapi_extra=extra, **options
            )
            if method == "GET":  # load balancers ask with HEAD; the HTTP server leaves the body out
                hidden = {**options, "include_in_schema": False}
                self._app.add_api_route(
                    path, function, methods=["HEAD"], dependencies=dependencies, openapi_extra=extra, **hidden
                )
            return function

        return declare


def _as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Write what an endpoint returns as JSON in its own thread, and not in that of the event loop."""

    @wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Response:
        result = function(*args, **kwargs)
        return result if isinstance(result, Response) else JSONResponse(result)

    return answer


class _Needs:
    """A dependency that refuses requests without a right."""

    def __init__(self, right: Right) -> None:
        self.right = right

    async def __call__(self, request: Request) -> None:  # no coroutine would be run in another thread
        access(request).check(self.right)


def access(request: Request) -> Access:
    """What a request may do, as the server's frame has found."""
    known: Access = request.state.access
    return known


def open_paths(app: FastAPI) -> frozenset[str]:
    """The paths that need no right and therefore no key."""
    return frozenset(
        route.path for route in app.routes if isinstance(route, APIRoute) and _right_of(route) == _NONE
    )


def whole_paths(app: FastAPI) -> frozenset[str]:
    """Return the paths that hold no parameter."""
    return frozenset(
        route.path for route in app.routes if isinstance(route, APIRoute) and "{" not in route.path
    )


def methods_of(app: FastAPI, path: str) -> list[str]:
    """Return the methods that a path takes, sorted; empty if there is no such path."""
    found = {
        method
        for route in app.routes
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }
    return sorted({*found, "OPTIONS"}) if found else []


def check_declared(app: FastAPI) -> None:
    """Refuse an application with a route that says nothing of its right.

    Raises:
        RuntimeError: names it.
    """
    for route in app.routes:
        if not isinstance(route, APIRoute) or _right_of(route) is None:
            raise RuntimeError(f"{getattr(route, 'path', route)} does not declare the right that it needs")


def _right_of(route: APIRoute) -> Any:
    return (route.openapi_extra or {}).get(_RIGHT)
