"""The files of the page, and what a browser is told of them."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import PurePath

from fastapi.responses import Response

from knnstore.server.access import Endpoints

_START = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# Text of documents is only ever text. Were it taken for something else by mistake, the browser refuses to run
# it, to ask another server for anything, and to make elements of strings.
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
    """Declare the page, for everybody: it holds nothing of the store, and asks as any client does."""
    for file in (files(__package__) / "static").iterdir():
        path = "/" if file.name == _START else f"/page/{file.name}"
        kind = f"{_TYPES[PurePath(file.name).suffix]}; charset=utf-8"
        routes.add("GET", path, None, include_in_schema=False)(_answer(file.read_bytes(), kind))


def _answer(content: bytes, kind: str) -> Callable[[], Response]:
    def answer() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer
