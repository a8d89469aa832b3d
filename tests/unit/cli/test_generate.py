"""``penstock generate``: what its flags come to, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import PipelineError, run
from penstock.engine.options import EngineOptions
from penstock.run import Asked
from penstock.speculation import SpeculativeConfig
from penstock.strategies.base import STRATEGIES
from tests.unit.cli.invoke import invoke

USER = {"role": "user", "content": "hi"}
DEMO_DRAFT = SpeculativeConfig(method="draft_model", model="demo")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every ``complete`` instead of a generation."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run, "complete", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], DEMO_DRAFT),
        (["--model", "m"], SpeculativeConfig(method="ngram")),
        (["--model", "m", "--draft-model", "d"], SpeculativeConfig(method="draft_model", model="d")),
        (["--draft-model", "d"], SpeculativeConfig(method="draft_model", model="d")),
        (["--strategy", "autoregressive"], SpeculativeConfig(strategy="autoregressive")),
        (
            ["--strategy", "static_tree"],
            SpeculativeConfig(method="draft_model", model="demo", strategy="static_tree"),
        ),
        (["--speculative-config", '{"strategy": "autoregressive"}'], SpeculativeConfig(strategy="autoregressive")),
        (["--speculative-config", '{"method": "ngram", "width": 8}'], SpeculativeConfig(method="ngram", width=8)),
        (
            ["--speculative-config", '{"width": 8}', "--draft-model", "d", "--strategy", "pipedec"],
            SpeculativeConfig(method="draft_model", model="d", strategy="pipedec", width=8),
        ),
    ],
)
def test_who_drafts(called: list[tuple[Any, ...]], flags: list[str], expected: SpeculativeConfig) -> None:
    result = invoke("generate", "x", *flags)
    assert result.exit_code == 0, result.output
    assert called[0][1].speculative_config == expected


def test_what_is_not_given_is_left_to_engine_and_checkpoint(called: list[tuple[Any, ...]]) -> None:
    invoke("generate", "x")
    options = EngineOptions(speculative_config=DEMO_DRAFT)
    assert called == [(Asked(text="x"), options, {"max_tokens": 128, "ignore_eos": False}, False, None)]


def test_what_is_given_is_passed_on(called: list[tuple[Any, ...]]) -> None:
    result = invoke(
        *("generate", "x", "-pp", "3", "--layer-split", "2,2,1", "--dtype", "bfloat16", "--max-model-len", "64"),
        *("--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1", "--seed", "1"),
        *("--max-tokens", "9", "--stop", "a", "--stop", "b", "--ignore-eos", "--json", "--cluster", "demo"),
    )
    assert result.exit_code == 0, result.output
    _, options, sampling, as_json, _ = called[0]
    assert options == EngineOptions(
        pipeline_parallel_size=3,
        layer_split="2,2,1",
        cluster="demo",
        dtype="bfloat16",
        max_model_len=64,
        speculative_config=DEMO_DRAFT,
    )
    assert sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 1,
        "max_tokens": 9,
        "stop": ("a", "b"),
        "ignore_eos": True,
    }
    assert as_json


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_the_prompt_is_read_from_a_pipe_as_it_stands(called: list[tuple[Any, ...]], prompt: list[str]) -> None:
    assert invoke("generate", *prompt, stdin="two\nlines\n").exit_code == 0
    assert called[0][0] == Asked(text="two\nlines\n")


def test_without_a_prompt_the_remedy_is_named(called: list[tuple[Any, ...]]) -> None:
    result = invoke("generate", stdin="")
    assert (result.exit_code, called) == (2, [])
    assert "give a text, or write one to standard input" in " ".join(result.stderr.split())


def test_a_conversation_is_read_from_its_file(called: list[tuple[Any, ...]], tmp_path: Path) -> None:
    talk, template = tmp_path / "talk.json", tmp_path / "chat.jinja"
    talk.write_text(json.dumps({"messages": [USER], "tools": []}))
    template.write_text("{{ messages }}")
    flags = ["--messages", str(talk), "--system-prompt", "Be brief.", "--chat-template", str(template)]
    assert invoke("generate", "and then?", *flags).exit_code == 0
    asked = called[0][0]
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "user", "content": "and then?"},
    ]
    assert asked.conversation.tools == []
    assert asked.chat_template == "{{ messages }}"
    assert invoke("generate", *flags, stdin="not read").exit_code == 0
    assert called[1][0].text is None


def test_an_answer_is_not_answered(called: list[tuple[Any, ...]], tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps([USER, {"role": "assistant", "content": "Hello."}]))
    result = invoke("generate", "--messages", str(talk))
    assert result.exit_code == 2
    assert "messages end with the assistant's own turn" in result.stderr
    assert invoke("generate", "and?", "--messages", str(talk)).exit_code == 0


@pytest.mark.parametrize("flag", ["--system-prompt", "--messages", "--chat-template"])
def test_raw_text_has_no_template(called: list[tuple[Any, ...]], flag: str) -> None:
    assert invoke("generate", "x", "--raw").exit_code == 0
    assert called[0][0] == Asked(text="x", raw=True)
    result = invoke("generate", "x", "--raw", flag, "y")
    assert result.exit_code == 2
    assert "raw continues a text without a chat template; remove it, or " in result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--strategy", "pipdec"],
            f"did you mean 'pipedec'? Known: {', '.join(STRATEGIES)}",
        ),
        (["--cluster", "dmo"], "did you mean 'demo'?"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--dtype", "int3"], "dtype is 'int3'"),
        (["-pp", "0"], "pipeline_parallel_size is 0"),
        (["--speculative-config", "{"], "speculative_config is not JSON"),
        (["--speculative-config", "[]"], "it has to be a JSON object"),
        (["--speculative-config", '{"widht": 3}'], "did you mean 'width'?"),
        (["--speculative-config", '{"model": "a"}', "--draft-model", "b"], "remove one"),
        (["--speculative-config", '{"strategy": "pipedec"}', "--strategy", "pipedec"], "remove one"),
        (["--strategy", "autoregressive", "--draft-model", "b"], "drafts nothing"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(flags: list[str], said: str) -> None:
    result = invoke("generate", "x", *flags)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("penstock: error: ")
    assert result.stderr.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize(
    "arguments", [["generate", "x", "--tempreature", "1"], ["generate", "x", "-pp", "two"], ["go"]]
)
def test_a_wrong_flag_is_exit_code_2(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


def test_a_lost_stage_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> None:
        raise PipelineError("stage 1 was lost: killed")

    monkeypatch.setattr(run, "complete", lose)
    result = invoke("generate", "x")
    assert result.exit_code == 1
    assert result.stderr == "penstock: error: stage 1 was lost: killed\n"
