"""The web page's files: read once, served with an entity tag, and under a policy that loads nothing else."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

FOLDER: Final = Path(__file__).parent / "page"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Cache-Control": "no-cache",  # stored, but checked each time: the files change with the package
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile:
    """One file of the page, with its media type and its entity tag."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.tag = f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'

    def response(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.type, headers=headers)


def page_router() -> APIRouter:
    """Routes for ``/`` and ``/page/NAME``. They need no API key, as they hold nothing secret."""
    files = {path.name: PageFile(path) for path in FOLDER.iterdir() if path.is_file()}
    routes = APIRouter()

    @routes.get("/")
    def index(request: Request) -> Response:
        return files["index.html"].response(request)

    @routes.get("/page/{name}")
    def page(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r}")
        return files[name].response(request)

    return routes
