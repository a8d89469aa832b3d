"""A server's address and its errors in words."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from penstock.clients.api import Server, ServerError, card_of, first_card, first_model, message_of, refused
from penstock.core import ConfigError


@pytest.mark.parametrize(
    ("given", "url", "root"),
    [
        ("http://a:1", "http://a:1/v1", "http://a:1"),
        ("http://a:1/", "http://a:1/v1", "http://a:1"),
        ("https://a/v1/", "https://a/v1", "https://a"),
        ("https://a/api/v1", "https://a/api/v1", "https://a/api"),
        ("https://a/openai", "https://a/openai", "https://a/openai"),
    ],
)
def test_addresses(given: str, url: str, root: str) -> None:
    server = Server(url=given)
    assert (server.url, server.root) == (url, root)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "http://a:port", "http://a..b", f"http://{'a' * 64}/v1"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="url is"):
        Server(url=url)


def test_a_password_is_not_shown() -> None:
    assert Server(url="http://me:secret@a/v1").shown == "http://a/v1"


def test_the_key_is_sent_only_where_there_is_one() -> None:
    assert Server().client_options["headers"] == {}
    assert Server(api_key="k").client_options["headers"] == {"Authorization": "Bearer k"}


def test_the_key_may_come_from_a_file_and_is_not_shown(tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text("sesame\n")
    server = Server(api_key="other", api_key_file=file)
    assert server.client_options["headers"] == {"Authorization": "Bearer sesame"}
    assert "sesame" not in repr(server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "n is 0", "param": "n"}}', "n is 0"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"detail": [{"loc": ["n"]}]}', '[{"loc": ["n"]}]'),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b"<html>Bad Gateway", "<html>Bad Gateway"),
        (b"", ""),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_messages_of_all_sorts_of_servers(body: bytes, message: str) -> None:
    assert message_of(body) == message


def test_a_refused_key_names_the_flag() -> None:
    error = refused(httpx.Response(401, json={"error": {"message": "wrong key"}}))
    assert str(error) == "the server answers 401: wrong key; give the key with --api-key-file or PENSTOCK_API_KEY"


def test_a_refusal_names_status_and_reason() -> None:
    error = refused(httpx.Response(502, content=b""))
    assert (error.kind, str(error)) == ("HTTP 502", "the server answers 502: Bad Gateway")


@pytest.mark.parametrize("body", [b"{}", b'{"data": []}', b"[]", b"no JSON"])
def test_a_server_without_models(body: bytes) -> None:
    with pytest.raises(ServerError, match="--model"):
        first_model(httpx.Response(200, content=body))


def test_no_server_says_how_to_start_one() -> None:
    error = Server().lost(httpx.ConnectError("refused"))
    assert "no server answers at http://127.0.0.1:8000/v1 (refused)" in str(error)
    assert "'penstock serve MODEL'" in str(error)
    assert error.kind == "ConnectError"


def test_a_model_that_is_named_has_its_own_card() -> None:
    cards = {"data": [{"id": "m"}, {"id": "n", "chat_sampling": {"temperature": 0.8}}]}
    assert card_of(httpx.Response(200, json=cards), "n") == {"id": "n", "chat_sampling": {"temperature": 0.8}}
    assert card_of(httpx.Response(200, json=cards), "o") is None
    for content in ({}, {"data": [{}]}, {"data": ["m"]}, []):
        assert card_of(httpx.Response(404, json=content), "m") is None


def test_the_first_card_has_all_that_the_server_says_of_its_model() -> None:
    card = {"id": "m", "chat_sampling": {"temperature": 0.8}}
    assert first_card(httpx.Response(200, json={"data": [card, {"id": "n"}]})) == card
    for content in ({"data": []}, {"data": [{}]}, {"data": ["m"]}, []):
        with pytest.raises(ServerError, match="cannot be read"):
            first_card(httpx.Response(200, json=content))
