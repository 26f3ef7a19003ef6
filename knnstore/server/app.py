"""The ASGI application with all endpoints and the handlers of errors. `make_app` builds it."""

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import knnstore
from knnstore.catalog import Right
from knnstore.errors import KnnstoreError
from knnstore.server.access import (
    Endpoints,
    Gate,
    check_rights_declared,
    get_access,
    list_fixed_paths,
    list_methods,
    list_open_paths,
)
from knnstore.server.bodies import BodyRoute
from knnstore.server.completions import declare_completions
from knnstore.server.documents import declare_documents
from knnstore.server.engine import EngineBusyError, EngineStoppedError
from knnstore.server.errors import ApiError, convert_to_api_error
from knnstore.server.frame import Frame
from knnstore.server.introspection import declare_introspection
from knnstore.server.metrics import Metrics
from knnstore.server.page import declare_page
from knnstore.server.serving import Serving

_logger = logging.getLogger(__name__)

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Options:
    """Access settings of a server: who is answered, and whether metrics are public."""

    local_only: bool = True
    """True if only requests whose Host header names this machine are answered."""
    public_metrics: bool = False
    """True if ``/metrics`` needs no key."""


def make_app(
    serving: Serving, gate: Gate, metrics: Metrics, options: Options, lifespan: Lifespan | None = None
) -> ASGIApp:
    """Return the application: all endpoints, inside the middleware `Frame` that checks every request.

    Args:
        serving: the server's state; its model need not be loaded yet.
        gate: object that finds the permissions of each client by its API key.
        metrics: the metrics in which requests are counted.
        options: the access settings.
        lifespan: context manager that is open from before the first request until after the last; None means
            no context.
    """
    app = make_endpoints(serving, metrics, options, lifespan)
    return Frame(
        app,
        gate,
        list_open_paths(app),
        list_fixed_paths(app),
        serving.limits.body_bytes,
        serving.limits.body_seconds,
        local_only=options.local_only,
        count=metrics.record_request,
    )


def make_endpoints(
    serving: Serving, metrics: Metrics, options: Options, lifespan: Lifespan | None = None
) -> FastAPI:
    """Return the application with all endpoints, without the middleware `Frame` that checks requests.

    Args:
        serving: the server's state; its model need not be loaded yet.
        metrics: the metrics that ``/metrics`` shows.
        options: the access settings.
        lifespan: context manager that is open from before the first request until after the last; None means
            no context.

    Raises:
        RuntimeError: if an endpoint does not declare which right it needs.
    """
    app = FastAPI(
        title="knnstore",
        version=knnstore.__version__,
        openapi_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.router.route_class = BodyRoute
    routes = Endpoints(app)
    _declare_server_endpoints(app, routes, serving, metrics, options)
    for declare in (declare_introspection, declare_completions, declare_documents):
        declare(routes, serving)
    declare_page(routes)
    for kind in (ApiError, KnnstoreError, EngineBusyError, EngineStoppedError, Exception):
        app.add_exception_handler(kind, _answer_known_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    app.add_exception_handler(HTTPException, _answer_http_error)
    check_rights_declared(app)
    return app


def _declare_server_endpoints(
    app: FastAPI, routes: Endpoints, serving: Serving, metrics: Metrics, options: Options
) -> None:
    """Declare the endpoints ``/health``, ``/health/live``, ``/metrics`` and ``/openapi.json``.

    Args:
        app: the application, whose OpenAPI description is shown.
        routes: the object with which endpoints are added to the application.
        serving: the server's state, which says whether the server is ready.
        metrics: the metrics that ``/metrics`` shows.
        options: the access settings; they say whether ``/metrics`` needs a key.
    """
    health_limiter = CapacityLimiter(1)  # a thread that no other request can take
    cached_description: list[dict[str, Any]] = []

    @routes.add("GET", "/health", None)
    async def health() -> Response:
        """Check whether the server is ready: 200, otherwise 503 with the reason."""
        status = await to_thread.run_sync(serving.status, limiter=health_limiter)
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @routes.add("GET", "/health/live", None)
    async def live() -> dict[str, str]:
        """Check whether the process is alive; it may still be loading the model."""
        return {"status": "alive"}

    @routes.add("GET", "/metrics", None if options.public_metrics else Right.ADMIN)
    def counted(request: Request) -> Response:
        """Return the metrics for Prometheus. They cover all domains together."""
        if not options.public_metrics and not get_access(request).sees_all_domains:
            raise ApiError(
                403,
                "the metrics cover all domains, but this key is limited to some of them",
                code="missing_right",
            )
        return Response(metrics.format_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.add("GET", "/openapi.json", Right.PREDICT)
    def description() -> dict[str, Any]:
        """Return this OpenAPI description."""
        if not cached_description:
            cached_description.append(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return cached_description[0]


async def _answer_known_error(_: Request, error: Exception) -> JSONResponse:
    """Return the JSON answer for an exception. Logs the exception if the status is 500."""
    api_error = convert_to_api_error(error)
    if api_error.status == 500:
        _logger.error("a request failed", exc_info=error)
    return JSONResponse(api_error.body, api_error.status, api_error.headers)


async def _answer_invalid_request(request: Request, error: Exception) -> JSONResponse:
    """Return the answer 400 with the first error of a request that fails validation."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = first.get("ctx", {}).get("field")
    path = [*first["loc"][1:], *([field] if field else [])]  # the first is "body" or "query"
    where = ".".join(str(part) for part in path)
    if first["type"] == "json_invalid":
        where, reason = "", f"the body is not JSON: {first.get('ctx', {}).get('error', '')}"
    elif first["type"] == "model_attributes_type" and not where:
        reason = "the body is not a JSON object, or the header content-type: application/json is missing"
    elif first["type"] == "extra_forbidden":
        reason = f"{where}: this server does not know this field"
    else:
        message = str(first["msg"]).removeprefix("Value error, ")
        reason = message if message.startswith(f"{where}:") or not where else f"{where}: {message}"
    return await _answer_known_error(request, ApiError(400, reason, param=where or None))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Return the answer for an HTTP error (`HTTPException`) that was raised for a request.

    The status is 404 for an unknown path, 405 with the allowed methods for a wrong method, and 204 for the
    method OPTIONS of a known path. Any other HTTP error, such as a body that is too large, becomes a JSON
    error of the same status.
    """
    assert isinstance(error, HTTPException)
    headers, reason, path = dict(error.headers or {}), str(error.detail), request.url.path
    if error.status_code == 405:
        methods = list_methods(request.app, path)
        headers["Allow"] = ", ".join(methods)
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        reason = f"{path} does not accept {request.method}, only {headers['Allow']}"
    elif error.status_code == 404:
        reason = f"this server has no {path}"
        if list_methods(request.app, f"/v1{path}"):
            reason += f"; /v1{path} exists: let the client's base URL end with /v1"
    return await _answer_known_error(request, ApiError(error.status_code, reason, headers=headers))
