"""``penstock serve``: flags, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.engine.options import EngineOptions
from penstock.files import PROMISES
from penstock.server import command
from penstock.server.settings import Listening, ServerSettings


def test_whoever_reads_the_announcement_can_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(_: list[socket.socket]) -> None:
        """A server that is told to end before it has begun."""

    def connect(llm: Any, settings: ServerSettings, url: str, seconds: float) -> None:
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)).close()
        connected.append(url)

    connected: list[str] = []
    monkeypatch.setattr(command, "watched", lambda *_: (SimpleNamespace(close=lambda: None), None))
    app = SimpleNamespace(state=SimpleNamespace(gate=None))
    monkeypatch.setattr(command, "make_app", lambda *_: app)
    monkeypatch.setattr(command, "Server", lambda *_, **__: SimpleNamespace(serve=ended))
    monkeypatch.setattr(command, "announce", connect)
    with (listening := Listening(port=0)).bind() as bound:
        asyncio.run(command.serve(EngineOptions(), ServerSettings(), listening, bound, None))
    assert connected


@pytest.mark.parametrize("numerics", PROMISES)
def test_what_holds_for_texts_is_announced(numerics: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm: Any = SimpleNamespace(numerics=numerics, setup=SimpleNamespace(stages=2), replicas=lambda: [None])
    command.announce(llm, ServerSettings(served_model_name=("m",)), "http://127.0.0.1:8000", 1.0)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Penstock serves m at http://127.0.0.1:8000")
    assert second == f"Numerics are {numerics}: {PROMISES[numerics]}"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_open_server_that_others_can_reach_is_warned_of(host: str, caplog: pytest.LogCaptureFixture) -> None:
    listening = Listening(host=host)
    command.warn(ServerSettings(), listening)
    assert ("--api-key-file" in caplog.text) is not listening.is_local
    caplog.clear()
    command.warn(ServerSettings(api_keys=("a",)), listening)
    assert not caplog.text


@pytest.mark.parametrize(
    ("words", "warned"), [(["--api-key=a"], True), (["--api-key", "a"], True), (["-pp", "2"], False)]
)
def test_a_key_that_others_can_see_is_warned_of(
    words: list[str], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "serve", *words])
    command.warn(ServerSettings(api_keys=("a",)), Listening())
    assert ("other users of this machine see the key" in caplog.text) is warned


def test_keys_of_the_file_join_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "keys").write_text("b\nc\n")
    seen: list[ServerSettings] = []

    async def serve(options: Any, settings: ServerSettings, *_: Any) -> None:
        seen.append(settings)

    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(command, "configure_logs", lambda level: None)
    settings = ServerSettings(api_keys=("a",), api_key_file=file)
    with (listening := Listening(port=0)).bind() as bound:
        command.run_serve(EngineOptions(), settings, listening, bound)
    assert seen[0].api_keys == ("a", "b", "c")
