"""Access control of the server: API keys, rights, visible domains, and rate limits.

A right is a permission such as PREDICT, READ, WRITE or ADMIN. A domain is a named set of stored documents.

`Gate` finds the permissions (`Access`) of a request, with the rate limits of its key (`Quota`). `Endpoints`
declares endpoints with the rights that they need. The functions at the end list the paths and methods of an
application, and check that each endpoint has declared its right.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from knnstore.catalog import AccessKey, AccessKeys, Right
from knnstore.server.errors import ApiError

_MINUTE = 60.0
_RETRY_SECONDS = 1
"""Seconds in the header Retry-After of an answer 429, if too many requests run at once."""


class Quota:
    """Rate limits of one API key: counts the running requests and the tokens used. Threads may share it.

    Tokens are limited by a token bucket: an account of `tokens` tokens that refills at the rate of `tokens` a
    minute. A request is accepted while the bucket is not empty, because the number of tokens that it will
    generate is not known beforehand. So the bucket can become negative; later requests are refused until it
    has refilled.

    Args:
        requests: largest number of requests of the key that may run at the same time; None means no limit.
        tokens: number of tokens a minute, prompt tokens and generated tokens together; None means no limit.
        now: function that returns the time in seconds.
    """

    def __init__(
        self,
        requests: int | None = None,
        tokens: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self.tokens = requests, tokens
        self._now = now
        self._running = 0
        self._tokens_left, self._refilled_at = float(tokens or 0), now()
        self._lock = threading.Lock()

    @contextmanager
    def count_running(self) -> Iterator[None]:
        """Count one more request as running while the context is open.

        Raises:
            ApiError: 429 if `requests` requests are running already; the request is not counted then.
        """
        with self._lock:
            if self.requests is not None and self._running >= self.requests:
                raise _rate_limit_error(
                    f"this key has reached its limit of {self.requests:,} requests at once", _RETRY_SECONDS
                )
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def check_and_spend(self, tokens: int) -> None:
        """Accept a new request if the bucket is not empty, and subtract its prompt tokens from the bucket.

        The bucket may become negative. Without a token limit every request is accepted.

        Args:
            tokens: number of tokens to subtract, 0 or more.

        Raises:
            ApiError: 429 if the bucket is empty or negative; nothing is subtracted then. The header
                Retry-After has the number of seconds after which the bucket is no longer empty.
        """
        with self._lock:
            if self.tokens is not None and self._refill_bucket() <= 0:
                wait = max(1, math.ceil(-self._tokens_left * _MINUTE / self.tokens))
                raise _rate_limit_error(
                    f"this key has reached its limit of {self.tokens:,} tokens a minute", wait
                )
            self._tokens_left -= tokens

    def spend_unchecked(self, tokens: int) -> None:
        """Subtract further tokens of a request that was accepted before. The bucket may become negative."""
        with self._lock:
            self._tokens_left -= tokens

    def _refill_bucket(self) -> float:
        """Refill the bucket up to the current time, and return the number of tokens in it.

        The bucket holds at most the tokens of one minute. The caller holds the lock. There must be a token
        limit.
        """
        assert self.tokens is not None
        now = self._now()
        self._tokens_left = min(
            self.tokens, self._tokens_left + self.tokens * (now - self._refilled_at) / _MINUTE
        )
        self._refilled_at = now
        return self._tokens_left


UNLIMITED = Quota()
"""Quota without limits, for requests without a key and for keys without limits."""


def _rate_limit_error(message: str, wait: int) -> ApiError:
    """Return, but do not raise, the error 429 for a client that has reached a rate limit.

    Args:
        message: the text for the client, which names the limit.
        wait: number of seconds after which the client may try again, for the header Retry-After.
    """
    headers = {"Retry-After": str(wait)}
    return ApiError(429, f"{message}: try again later", code="rate_limit_exceeded", headers=headers)


_PREFIX = "Bearer "
_RIGHT, _NONE = "x-knnstore-right", "none"  # field of each endpoint's OpenAPI description, and its value


@dataclass(frozen=True, slots=True)
class Access:
    """Permissions of the client that sent a request: its rights and the domains that it may see."""

    rights: frozenset[Right]
    """The client's rights."""
    domains: frozenset[str] | None = None
    """Names of the domains (named sets of documents) that the client may see; None means all domains, also
    domains that are created later."""
    key: str = ""
    """Public id of the API key, for the log; empty if the request has no key."""
    quota: Quota = UNLIMITED
    """Rate limits of the key, with the requests and tokens that were counted so far."""

    @property
    def sees_all_domains(self) -> bool:
        """True if the client may see all domains."""
        return self.domains is None

    def may_see_domain(self, domain: str) -> bool:
        """Check whether the client may see the domain with this name. The domain need not exist."""
        return self.domains is None or domain in self.domains

    def filter_visible(self, domains: Iterable[str]) -> list[str]:
        """Return the domain names among `domains` that the client may see, in the order of `domains`."""
        return [domain for domain in domains if self.may_see_domain(domain)]

    def check(self, right: Right) -> None:
        """Raise an error if the client lacks a right; otherwise do nothing.

        Args:
            right: the right that the client must have.

        Raises:
            ApiError: 403 if the client lacks the right.
        """
        if right not in self.rights:
            raise ApiError(403, f"this key lacks the right {right.value!r}", code="missing_right")


EVERYBODY = Access(frozenset(Right))
"""Permissions of clients without a key, on a server that needs none."""


class Gate:
    """Finds the permissions of each request by its API key, and keeps the rate limits of each key.

    Args:
        keys: the API keys of the store.
        required: True if each request needs a key. If False, a request without a key has all rights, and a
            key is checked only if the request has one.
    """

    def __init__(self, keys: AccessKeys, *, required: bool) -> None:
        self._keys = keys
        self._required = required
        self._quotas: dict[str, Quota] = {}

    async def authenticate_request(self, authorization: str) -> Access:
        """Return the permissions of the client that sent a request, found by the API key in its header.

        The key is looked up in a worker thread, so that the event loop does not wait. The right ADMIN
        includes all other rights. If no key is required, a request without a key has all rights
        (`EVERYBODY`). The same holds for a value that does not have the form of a key, because clients send
        arbitrary placeholders.

        Args:
            authorization: value of the HTTP header Authorization, ``Bearer KEY``; empty if the request has
                none.

        Raises:
            ApiError: 401 if the key is missing, unknown or expired. The message is the same in all three
                cases.
        """
        api_key = authorization.removeprefix(_PREFIX).strip() if authorization.startswith(_PREFIX) else ""
        if not self._required and not AccessKeys.has_key_format(api_key):
            return EVERYBODY
        found_key = await run_in_threadpool(self._keys.find, api_key)
        if found_key is None:
            raise ApiError(
                401,
                "a valid key is needed: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        rights = frozenset(Right) if Right.ADMIN in found_key.rights else found_key.rights
        domains = None if found_key.domains is None else frozenset(found_key.domains)
        return Access(rights, domains, found_key.id, self._get_or_create_quota(found_key))

    def reset_quotas(self) -> None:
        """Reset the rate limits of all keys: no request counts as running, and no token counts as used."""
        self._quotas.clear()

    def _get_or_create_quota(self, key: AccessKey) -> Quota:
        """Return the rate limits of a key, with the key's running requests and used tokens.

        The object is created at the first request of the key, and kept until `reset_quotas`. A key without
        limits gets `UNLIMITED`.
        """
        if key.requests is None and key.tokens is None:
            return UNLIMITED
        return self._quotas.setdefault(key.id, Quota(key.requests, key.tokens))


class Endpoints:
    """Adds endpoints to a FastAPI application, and declares the right that each endpoint needs.

    Args:
        app: the application.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def add(
        self, method: str, path: str, right: Right | None, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a function to the application as an endpoint.

        The decorator returns the function unchanged. Requests without the right get the error 403. A GET
        endpoint also answers HEAD. The result of a synchronous function is converted to JSON in the worker
        thread that runs the function.

        Args:
            method: the HTTP method.
            path: the path, with parameters in braces.
            right: the right that a request needs; None if the endpoint is open to requests without a key.
            options: further arguments of FastAPI's `add_api_route`.
        """

        def register_endpoint(function: Callable[..., Any]) -> Callable[..., Any]:
            """Add a function to the application as an endpoint, and return it unchanged."""
            dependencies = [] if right is None else [Depends(_RightCheck(right))]
            openapi_fields = {_RIGHT: right.value if right else _NONE}
            endpoint = function if iscoroutinefunction(function) else _wrap_as_json_response(function)
            self._app.add_api_route(
                path,
                endpoint,
                methods=[method],
                dependencies=dependencies,
                openapi_extra=openapi_fields,
                **options,
            )
            if method == "GET":  # load balancers send HEAD; the HTTP server leaves the body out
                hidden_options = {**options, "include_in_schema": False}
                self._app.add_api_route(
                    path,
                    function,
                    methods=["HEAD"],
                    dependencies=dependencies,
                    openapi_extra=openapi_fields,
                    **hidden_options,
                )
            return function

        return register_endpoint


def _wrap_as_json_response(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of a synchronous endpoint function that also converts the function's result to JSON.

    FastAPI would convert the result in the event loop. The wrapper does it in the worker thread that runs the
    function. A result that is a `Response` is returned unchanged.
    """

    @wraps(function)
    def convert_to_response(*args: Any, **kwargs: Any) -> Response:
        """Call the endpoint function, and return its result as an HTTP response."""
        result = function(*args, **kwargs)
        return result if isinstance(result, Response) else JSONResponse(result)

    return convert_to_response


class _RightCheck:
    """FastAPI dependency that raises ApiError 403 if the client of a request lacks a right.

    Args:
        right: the right that the client must have.
    """

    def __init__(self, right: Right) -> None:
        self.right = right

    # A coroutine, because FastAPI would call a plain function in a worker thread.
    async def __call__(self, request: Request) -> None:
        get_access(request).check(self.right)


def get_access(request: Request) -> Access:
    """Return the permissions of a request's client, which the middleware `Frame` has found by the API key."""
    permissions: Access = request.state.access
    return permissions


def list_open_paths(app: FastAPI) -> frozenset[str]:
    """Return the paths of the endpoints that need neither a right nor an API key."""
    return frozenset(
        route.path for route in app.routes if isinstance(route, APIRoute) and _declared_right(route) == _NONE
    )


def list_fixed_paths(app: FastAPI) -> frozenset[str]:
    """Return the paths of the endpoints whose paths have no parameters in braces."""
    return frozenset(
        route.path for route in app.routes if isinstance(route, APIRoute) and "{" not in route.path
    )


def list_methods(app: FastAPI, path: str) -> list[str]:
    """Return the HTTP methods that the application allows for a path, sorted.

    OPTIONS is included for every known path. An unknown path gives an empty list.

    Args:
        app: the application.
        path: the path of a request, with values in place of the parameters.
    """
    methods = {
        method
        for route in app.routes
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }
    return sorted({*methods, "OPTIONS"}) if methods else []


def check_rights_declared(app: FastAPI) -> None:
    """Check that each endpoint of an application has declared which right it needs.

    Raises:
        RuntimeError: if an endpoint has not declared a right. The message names the endpoint's path.
    """
    for route in app.routes:
        if not isinstance(route, APIRoute) or _declared_right(route) is None:
            raise RuntimeError(f"{getattr(route, 'path', route)} does not declare the right that it needs")


def _declared_right(route: APIRoute) -> Any:
    """Return the name of the right that an endpoint has declared, or "none" if it is open.

    Returns None if the endpoint has declared nothing.
    """
    return (route.openapi_extra or {}).get(_RIGHT)
