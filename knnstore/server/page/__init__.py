"""The inspector: a web page of the server that shows the sources of each token of a text.

A source is a stored document whose records were retrieved for the token. The page consists of plain
JavaScript modules and loads nothing from other servers. `declare_page` serves them, with HTTP headers that
forbid the page to run or load anything else.
"""

from collections.abc import Callable
from importlib.resources import files
from pathlib import PurePath

from fastapi.responses import Response

from knnstore.server.access import Endpoints

__all__ = ["declare_page"]

_START = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# The page shows text of documents as text only. If it treated that text as HTML by mistake, this policy makes
# the browser refuse to run it as a script, to contact another server, and to create elements from strings.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def declare_page(routes: Endpoints) -> None:
    """Add an endpoint to the application for each file of the inspector page.

    The start page is at ``/``, each other file at ``/page/NAME``. No API key is needed to load the files,
    because they hold no data of the store. The page then sends the same requests as any other client.

    Args:
        routes: the object with which endpoints are added to the application.
    """
    for file in (files(__package__) / "static").iterdir():
        path = "/" if file.name == _START else f"/page/{file.name}"
        kind = f"{_TYPES[PurePath(file.name).suffix]}; charset=utf-8"
        routes.add("GET", path, None, include_in_schema=False)(_make_file_endpoint(file.read_bytes(), kind))


def _make_file_endpoint(content: bytes, kind: str) -> Callable[[], Response]:
    """Return an endpoint function that answers every request with the bytes of one file.

    Args:
        content: the bytes of the file.
        kind: the value of the header Content-Type.
    """

    def answer_with_file() -> Response:
        """Return the answer with the file and the security headers of the page."""
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer_with_file
