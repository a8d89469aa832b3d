"""A server on a Unix socket, over an application of the test's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from penstock.core import ConfigError
from penstock.server import command
from penstock.server.command import served_at
from penstock.server.http.serving import Gate
from penstock.server.settings import ServerSettings


def application(*_: Any) -> FastAPI:
    app = FastAPI()
    app.state.gate = Gate()
    app.get("/")(lambda: "here")
    return app


def test_it_is_there_while_the_block_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "make_app", application)
    closed: list[bool] = []
    llm: Any = SimpleNamespace(close=lambda: closed.append(True))
    path = tmp_path / "http"
    with served_at(path, llm, ServerSettings()):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://any/").json() == "here"
        assert not closed
    assert closed
    assert not path.exists()


def test_what_keeps_it_from_starting_is_the_blocks_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> FastAPI:
        raise ConfigError("chat_template is broken")

    monkeypatch.setattr(command, "make_app", broken)
    llm: Any = None
    with pytest.raises(ConfigError, match="chat_template is broken"), served_at(tmp_path / "s", llm, ServerSettings()):
        pass
    assert not (tmp_path / "s").exists()
