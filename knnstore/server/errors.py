"""Errors in the form of OpenAI's protocol: a status, and an object with message, type, param and code.

`ApiError` is an answer of this form, `bad_request_error` makes one for a bad request, `convert_to_api_error`
converts any exception.
"""

from typing import Any

from knnstore.checks import escape_unprintable
from knnstore.errors import (
    AmbiguousDocumentError,
    ConfigError,
    DiskFullError,
    DocumentNotFoundError,
    DomainNotFoundError,
    FencedError,
    InputError,
    KnnstoreError,
    LockedError,
    ModelOutputError,
    ReadOnlyError,
    StoreUnavailableError,
)
from knnstore.server.engine import EngineBusyError, EngineStoppedError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Field `type` of an error by its status."""

_RETRY_SECONDS = 1
"""Seconds after which a client may try again if too many requests wait."""


class ApiError(Exception):
    """An HTTP answer that is an error.

    Args:
        status: the HTTP status; it determines the error's type.
        message: the text for the client. Characters that are not printable are escaped.
        code: a short name of the error for programs.
        param: the field of the request that is wrong.
        headers: further HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = escape_unprintable(message)  # it may quote the request
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


def bad_request_error(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return, but do not raise, the error 400 for a request that is wrong or exceeds a limit.

    Args:
        message: the text for the client.
        param: the field of the request that is wrong; None if no single field is.
        code: a short name of the error for programs; None if it has none.
    """
    return ApiError(400, message, param=param, code=code)


def convert_to_api_error(error: BaseException) -> ApiError:
    """Return the error that a client gets for an exception. An `ApiError` is returned unchanged.

    Known exceptions of the store and the engine get a fitting status and message. An unknown exception
    becomes the status 500 with a general message, so that no detail of the server leaks.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusyError):
        return ApiError(
            429,
            "the queue of the server is full: try again later",
            code="queue_full",
            headers={"Retry-After": str(_RETRY_SECONDS)},
        )
    if isinstance(error, EngineStoppedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, InputError | ConfigError):
        return bad_request_error(str(error))
    if isinstance(error, DocumentNotFoundError | DomainNotFoundError | AmbiguousDocumentError):
        return ApiError(404, "there is no such document or domain", code="document_not_found")
    if isinstance(error, ReadOnlyError | LockedError):
        return ApiError(403, "this server only reads its store", code="read_only")
    if isinstance(error, DiskFullError):
        return ApiError(507, "the server's disk is full", code="disk_full")
    if isinstance(error, FencedError):
        return ApiError(503, "another process has taken over the store", code="store_taken_over")
    if isinstance(error, ModelOutputError):
        return ApiError(500, str(error), code="model_output")
    if isinstance(error, StoreUnavailableError):
        return ApiError(503, "the store cannot be reached: try again later", code="store_unavailable")
    summary = "the store failed" if isinstance(error, KnnstoreError) else "the server failed"
    return ApiError(500, f"{summary}; see its log", code="internal_error")
