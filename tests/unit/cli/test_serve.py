"""``penstock serve``: what its flags come to, and what is refused before anything starts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.engine import resolve
from penstock.engine.options import EngineOptions
from penstock.server import command
from penstock.server.settings import Listening, ServerSettings
from penstock.speculation import SpeculativeConfig


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every ``run_serve`` instead of a server."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command, "run_serve", lambda *arguments: calls.append(arguments[:3]))
    monkeypatch.setattr("penstock.cli.run.fork_from_here", lambda model: None)
    monkeypatch.setattr("penstock.cli.run.model_folder", lambda name, part: name)
    monkeypatch.setattr(Listening, "bind", lambda listening: contextlib.nullcontext())
    monkeypatch.setattr(resolve, "check_options", lambda options: None)
    monkeypatch.setattr(Listening, "check_certificate", lambda listening: None)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    return calls


def serve(*flags: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["serve", *flags], env=environment)


def test_defaults_are_those_of_the_settings(called: list[tuple[Any, ...]]) -> None:
    assert serve().exit_code == 0
    drafting = SpeculativeConfig(method="draft_model", model="demo")
    assert called == [(EngineOptions(speculative_config=drafting), ServerSettings(), Listening())]


def test_flags(called: list[tuple[Any, ...]], tmp_path: Path) -> None:
    flags = ["my/model", "--host", "::1", "--port", "1", "-pp", "3", "--max-model-len", "99", "--max-num-seqs", "4"]
    flags += ["--api-key", "a", "--api-key", "b", "--served-model-name", "x", "--served-model-name", "y"]
    flags += ["--api-key-file", str(tmp_path / "keys"), "--allow-special-tokens-in-messages"]
    flags += ["--max-queue", "5", "--request-timeout", "6", "--queue-timeout", "7", "--drain-timeout", "0"]
    flags += ["--max-body-size", "9", "--body-timeout", "10", "--header-timeout", "11", "--max-connections", "12"]
    flags += ["--max-connections-per-address", "8"]
    flags += ["--allowed-origins", "https://a.org", "--allowed-origins", "*", "--no-web", "--log-prompts"]
    flags += ["--chat-template", str(tmp_path / "t"), "--log-level", "debug", "--strategy", "autoregressive"]
    flags += ["--root-path", "/llm", "--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem", "--seed", "3"]
    flags += ["--kv-slots", "200", "--no-enable-prefix-caching", "--prefill-chunk", "64", "--prefill-stretch", "1.5"]
    result = serve(*flags)
    assert result.exit_code == 0, result.output
    options, settings, listening = called[0]
    assert settings == ServerSettings(
        served_model_name=("x", "y"),
        api_keys=("a", "b"),
        api_key_file=tmp_path / "keys",
        chat_template=tmp_path / "t",
        allowed_origins=("https://a.org", "*"),
        allow_special_tokens_in_messages=True,
        web=False,
        log_level="debug",
        log_prompts=True,
        seed=3,
        max_body_size=9,
        body_timeout=10,
        max_queue=5,
        queue_timeout=7,
        request_timeout=6,
        drain_timeout=0,
    )
    assert listening == Listening(
        host="::1",
        port=1,
        max_connections=12,
        max_connections_per_address=8,
        header_timeout=11,
        root_path="/llm",
        ssl_certfile=Path("c.pem"),
        ssl_keyfile=Path("k.pem"),
    )
    assert options == EngineOptions(
        model="my/model",
        pipeline_parallel_size=3,
        max_model_len=99,
        max_num_seqs=4,
        kv_slots=200,
        enable_prefix_caching=False,
        prefill_chunk=64,
        prefill_stretch=1.5,
        speculative_config=SpeculativeConfig(strategy="autoregressive"),
    )


def test_the_key_may_come_from_the_environment_and_the_name_is_the_models(called: list[tuple[Any, ...]]) -> None:
    assert serve("some/model", PENSTOCK_API_KEY="secret").exit_code == 0
    settings = called[0][1]
    assert settings.api_keys == ("secret",)
    assert settings.served_model_name == ("some/model",)
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--port", "70000"], "port"),
        (["--request-timeout", "0"], "request_timeout"),
        (["--max-body-size", "0"], "max_body_size"),
        (["--drain-timeout", "-1"], "drain_timeout"),
        (["--max-connections", "0"], "max_connections"),
        (["--max-connections-per-address", "0"], "max_connections_per_address"),
        (["--api-key", ""], "api_key"),
        (["--api-key-file", "/nowhere/at/all"], "api_key_file"),
        (["--allowed-origins", "example.org"], "allowed_origins"),
        (["--max-queue", "0"], "max_queue"),
        (["--log-level", "loud"], "log_level"),
        (["--chat-template", "/nowhere/at/all"], "chat_template"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--kv-slots", "0"], "kv_slots"),
        (["--strategy", "magic"], "strategy"),
        (["--root-path", "llm"], "root_path"),
        (["--root-path", "/"], "root_path"),
        (["--ssl-keyfile", __file__], "ssl_certfile"),
        (["--ssl-certfile", "/nowhere/at/all"], "ssl_certfile"),
        (["--ssl-certfile", __file__], "ssl_certfile"),
        (["--seed", "-1"], "seed"),
        (["--device", "cuda:one"], "device"),
        (["--device", "gpu"], "device"),
    ],
)
def test_a_flag_that_cannot_be_is_named(flags: list[str], field: str) -> None:
    result = serve(*flags)
    assert result.exit_code == 2
    assert f"penstock: error: {field} " in result.output


def test_a_model_is_called_as_its_folder_or_file(called: list[tuple[Any, ...]], tmp_path: Path) -> None:
    folder, file = tmp_path / "My-Model", tmp_path / "My-Model.Q4_1.gguf"
    folder.mkdir()
    for model in (str(folder), f"{folder}/", str(file), "some/model"):
        assert serve(model).exit_code == 0
    names = [settings.served_model_name for _, settings, _ in called]
    assert names == [("My-Model",), ("My-Model",), ("My-Model.Q4_1",), ("some/model",)]
