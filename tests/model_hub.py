"""The hub, as far as pulling asks it: repositories of files, with what a network and a hub may do wrong."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import unquote, urlsplit

COMMIT: Final = "0123456789" * 4
LARGE: Final = (".gguf", ".safetensors", ".bin")
"""Suffixes of the files that the hub keeps in its large store, and states the SHA-256 of."""
RANGE: Final = re.compile(r"bytes=(\d+)-")


@dataclass
class Hub:
    """The repositories, and how the hub answers. HF_ENDPOINT names ``address``."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    address: str = ""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Repository -> status and error code of every answer about it."""
    cuts: list[int] = field(default_factory=list)
    """After how many bytes the next answers with a large file end early."""
    dies: bool = False
    """Whether the hub is down once it has cut an answer."""
    false: bool = False
    """Whether large files come with other bytes than those whose checksum is stated."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that are stated for files, where they are not their own."""
    is_down: bool = False
    """Whether every connection is closed without an answer."""
    sent: list[tuple[str, str | None]] = field(default_factory=list)
    """The large files that were sent, each with the range that was asked for."""

    def listing(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, content in self.repos[repo].items():
            size = self.sizes.get(name, len(content))
            one: dict[str, Any] = {"rfilename": name, "size": size, "blobId": blob_of(content)}
            if name.endswith(LARGE):
                one["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
            siblings.append(one)
        return {"id": repo, "sha": COMMIT, "siblings": siblings}


def blob_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.hub = hub


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        if hub.is_down:
            self.close_connection = True
            return
        asked = re.fullmatch(r"/api/models/(.+?)(?:/revision/.+)?|/(.+)/resolve/[^/]+/(.+)|/(files)/(.+)", path)
        if asked is None:  # huggingface_hub asks for more than models
            self.send(404, b"")
            return
        repo = asked[1] or asked[2] or asked[4]
        if repo in hub.refused:
            status, code = hub.refused[repo]
            self.send(status, b"", {"X-Error-Code": code})
        elif repo not in hub.repos:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif asked[1]:
            self.send(200, json.dumps(hub.listing(repo)).encode())
        else:
            self.send_file(hub, repo, asked[3] or asked[5])

    do_HEAD = do_GET

    def send_file(self, hub: Hub, repo: str, name: str) -> None:
        if name not in hub.repos[repo]:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = hub.repos[repo][name]
        is_large = name.endswith(LARGE)
        etag = hashlib.sha256(content).hexdigest() if is_large else blob_of(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        asked = self.headers["Range"]
        if is_large and self.command == "GET":
            hub.sent.append((name, asked))
            if hub.false:
                content = bytes(len(content))
        begin = RANGE.fullmatch(asked) if asked else None
        if begin is not None:
            first = int(begin[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            content = content[first:]
        cut = hub.cuts.pop(0) if is_large and hub.cuts and self.command == "GET" else None
        self.send(200 if begin is None else 206, content, headers, cut)
        hub.is_down = hub.dies and cut is not None

    def send(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
        self.close_connection = cut is not None

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    with Server(hub) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def files_in(folder: Path) -> dict[str, bytes]:
    """A checkpoint's files as those of a repository."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
