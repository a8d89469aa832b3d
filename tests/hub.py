"""The hub, as far as this package asks it: one repository, listed and sent from a folder, whole files or ranges."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

import pytest
from huggingface_hub.utils import close_session

REPO: Final = "some-one/tiny"
COMMIT: Final = "0123456789" * 4
RANGE: Final = re.compile(r"bytes=(\d+)-(\d+)")


class StandIn(ThreadingHTTPServer):
    """The hub with a folder's files as ``REPO`` at ``COMMIT``.

    ``sent`` are the files that it was asked for and the ranges of them (None is a whole file).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.sent: list[tuple[str, str | None]] = []
        self.status = 206
        """HTTP status of the answer to a request for a range."""
        self.lacks = 0
        """Bytes that are left out of the answer to a request for a range."""

    @property
    def listing(self) -> list[dict[str, object]]:
        """The repository's files in the form in which the hub lists them."""
        return [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file)}
            for file in sorted(self.folder.iterdir())
        ]


class Answer(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if self.path.startswith(f"/api/models/{REPO}/tree/{COMMIT}"):
            self._send(200, json.dumps(self.server.listing).encode())
        elif self.path.startswith(f"/api/models/{REPO}"):
            self._send(200, json.dumps({"id": REPO, "sha": COMMIT}).encode())
        else:
            self._send_file()

    do_HEAD = do_GET

    def _send_file(self) -> None:
        prefix, _, name = self.path.rpartition("/")
        file = self.server.folder / name
        assert prefix == f"/{REPO}/resolve/{COMMIT}", self.path
        asked = self.headers["Range"]
        if self.command == "GET":
            self.server.sent.append((name, asked))
        found = RANGE.fullmatch(asked or "")
        content = file.read_bytes()
        if found is None:
            self._send(200, content, {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(self.server.status, content[int(found[1]) : int(found[2]) + 1 - self.server.lacks])

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Serve ``folder`` in the place of the hub, for whoever asks it in this process."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with StandIn(folder) as server:
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", place + "/{repo_id}/resolve/{revision}/{filename}"
        )
        close_session()  # it knows the environment of its beginning
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
