"""``penstock rebalance``: what is asked of a server, and what is said of its answer."""

from __future__ import annotations

from functools import partial

import httpx
import pytest

from penstock.clients.api import Server, ServerError, rebalance


def answer_with(monkeypatch: pytest.MonkeyPatch, response: httpx.Response) -> list[httpx.Request]:
    asked: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return response

    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(take)))
    return asked


@pytest.mark.parametrize(("moving", "said"), [(True, "Stages move to hosts that are back"), (False, "No stage moves")])
def test_what_a_server_answers_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moving: bool, said: str
) -> None:
    asked = answer_with(monkeypatch, httpx.Response(200, json={"moving": moving}))
    rebalance(Server(url="http://a.example:8000", api_key="k"))
    assert [(one.method, str(one.url), one.headers["authorization"]) for one in asked] == [
        ("POST", "http://a.example:8000/rebalance", "Bearer k")
    ]
    assert said in capsys.readouterr().out


def test_a_server_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(
        monkeypatch, httpx.Response(503, json={"error": {"message": "no request is taken until hosts are back"}})
    )
    with pytest.raises(ServerError, match="503: no request is taken until hosts are back"):
        rebalance(Server())
