"""GET /, /docs and /page/{name}: pages to chat in the browser, and to read about the API."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

import headrace
from headrace.server.errors import JSON, ApiError, shown
from headrace.server.state import serving

router = APIRouter(include_in_schema=False)

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data: blob:"),
        *("form-action 'none'", "frame-ancestors 'none'", "base-uri 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    body: bytes
    media_type: str
    etag: str


def _read() -> dict[str, _File]:
    found = {}
    for file in resources.files("headrace.server").joinpath("page").iterdir():
        if (media_type := _TYPES.get(file.name.rpartition(".")[2])) is not None:
            body = file.read_bytes()
            found[file.name] = _File(body, f"{media_type}; charset=utf-8", f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


FILES = _read()
"""Name -> file of the page."""
PATHS = frozenset({"/docs", *(f"/page/{name}" for name in FILES)})


@router.get("/")
async def root(request: Request) -> Response:
    """The page for browsers; the version for other clients, and where the page is turned off."""
    if serving(request).settings.ui and "text/html" in request.headers.get("accept", ""):
        return _answer(request, FILES["index.html"])
    return JSON({"version": headrace.__version__}, headers={"Vary": "Accept"})


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The API, for people to read."""
    if not serving(request).settings.ui:
        raise ApiError(404, "the pages are turned off (--no-ui)", code="not_found")
    return _answer(request, FILES["docs.html"])


@router.get("/page/{name}")
async def file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES or not serving(request).settings.ui:
        raise ApiError(404, f"there is no page/{shown(name, 64)}", code="not_found")
    return _answer(request, FILES[name])


def _answer(request: Request, found: _File) -> Response:
    headers = _HEADERS | {"ETag": found.etag, "Vary": "Accept"}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.body, media_type=found.media_type, headers=headers)
