"""The page's files: what is served, and how."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.server.live.routes import FOLDER, page_router


def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_files_are_sent_with_type_tag_and_policy(name: str) -> None:
    pages = client()
    reply = pages.get("/" if name == "index.html" else f"/page/{name}")
    assert reply.content == (FOLDER / name).read_bytes()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert reply.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not any(word in policy for word in ("unsafe", "http", "*"))
    again = pages.get(reply.url.path, headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/routes.py", "/page/..%2froutes.py", "/page/../routes.py", "/page/"])
def test_nothing_else_is_served(path: str) -> None:
    assert client().get(path).status_code == 404


def test_the_page_names_no_other_origin_and_holds_no_script() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), file.name
    html = (FOLDER / "index.html").read_text()
    assert html.count("<script") == html.count('<script type="module" src="page/')
    assert not re.search(r"\s(style|on\w+)=", html)
