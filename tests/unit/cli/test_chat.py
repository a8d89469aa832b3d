"""Commands that talk to a server: where it is."""

from __future__ import annotations

import pytest

from penstock.cli import run
from penstock.clients.api import Server
from penstock.clients.chat import ChatOptions
from tests.unit.cli.invoke import invoke


def test_chat_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ChatOptions] = []
    monkeypatch.setattr(run, "run_chat", seen.append)
    monkeypatch.setenv("PENSTOCK_API_KEY", "k")
    assert invoke("chat", "--url", "http://a:1", "--model", "m", "--system-prompt", "s").exit_code == 0
    assert seen == [ChatOptions(server=Server(url="http://a:1/v1", api_key="k"), model="m", system="s")]


@pytest.mark.parametrize("command", [["bench", "serve"], ["chat"]])
def test_a_wrong_address_is_refused(command: list[str]) -> None:
    result = invoke(*command, "--url", "localhost:8000")
    assert result.exit_code == 2
    assert "url is 'localhost:8000'; it has to begin with http://" in result.stderr
