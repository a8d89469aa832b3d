"""Flags: what they come to, what is refused, and that none of it waits for torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import penstock
from penstock import PipelineError, cli, generate
from penstock.clients.api import Server
from penstock.config import SpeculativeConfig

DEMO_DRAFT = SpeculativeConfig(method="draft_model", model="demo")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every ``complete`` instead of a generation."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(generate, "complete", lambda *arguments: calls.append(arguments))
    return calls


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


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
    assert called[0][1]["speculative_config"] == expected


def test_what_is_not_given_is_left_to_engine_and_checkpoint(called: list[tuple[Any, ...]]) -> None:
    invoke("generate", "x")
    prompt, options, sampling, as_json, trace = called[0]
    assert (prompt, as_json, trace) == ("x", False, None)
    assert options.keys() == {"model", "dtype", "device", "speculative_config"}
    assert sampling == {"max_tokens": 128, "ignore_eos": False}


def test_what_is_given_is_passed_on(called: list[tuple[Any, ...]]) -> None:
    result = invoke(
        *("generate", "x", "-pp", "3", "--layer-split", "2,2,1", "--dtype", "bfloat16", "--max-model-len", "64"),
        *("--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1", "--seed", "1"),
        *("--max-tokens", "9", "--stop", "a", "--stop", "b", "--ignore-eos", "--json", "--cluster", "demo"),
    )
    assert result.exit_code == 0, result.output
    _, options, sampling, as_json, _ = called[0]
    assert options["pipeline_parallel_size"] == 3
    assert options["layer_split"] == "2,2,1"
    assert options["cluster"] == "demo"
    assert (options["dtype"], options["max_model_len"]) == ("bfloat16", 64)
    assert sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 1,
        "max_tokens": 9,
        "stop": ["a", "b"],
        "ignore_eos": True,
    }
    assert as_json


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_the_prompt_is_read_from_a_pipe_as_it_stands(called: list[tuple[Any, ...]], prompt: list[str]) -> None:
    assert invoke("generate", *prompt, stdin="two\nlines\n").exit_code == 0
    assert called[0][0] == "two\nlines\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--strategy", "pipdec"],
            "did you mean 'pipedec'? Known: auto, continuous, flowspec, pipedec, static_tree, autoregressive",
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

    monkeypatch.setattr(generate, "complete", lose)
    result = invoke("generate", "x")
    assert result.exit_code == 1
    assert result.stderr == "penstock: error: stage 1 was lost: killed\n"


def test_bench_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.bench.measure import command

    seen: list[command.BenchOptions] = []
    monkeypatch.setattr(command, "run_bench", seen.append)
    flags = ["--cluster", "demo", "--strategies", "autoregressive, pipedec", "--num-prompts", "2", "--top-k", "3"]
    assert invoke("bench", *flags).exit_code == 0
    assert seen[0].strategies == ("autoregressive", "pipedec")
    assert seen[0].speculative_config == {"method": "draft_model", "model": "demo"}
    assert (seen[0].cluster, seen[0].num_prompts, seen[0].top_k) == ("demo", 2, 3)
    assert (seen[0].prompts, seen[0].temperature, seen[0].seeds) == ((command.DEFAULT_PROMPTS,), (0.0,), 1)
    assert invoke("bench", "--strategies", "autoregressive").exit_code == 0
    assert not seen[1].speculative_config
    flags = ["--prompts", "a.jsonl", "--prompts", "b.jsonl", "--temperature", "0,0.6", "--seeds", "3"]
    assert invoke("bench", "--strategies", "pipedec[width=4,children=2],pipedec", *flags).exit_code == 0
    assert seen[2].strategies == ("pipedec[width=4,children=2]", "pipedec")
    assert seen[2].prompts == (Path("a.jsonl"), Path("b.jsonl"))
    assert (seen[2].temperature, seen[2].seeds) == ((0.0, 0.6), 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "bandwidth_gbit_s changes modelled times: it needs an emulated cluster"),
        (["--cluster", "local-2"], "cluster local-2: bandwidth_gbit_s is 1.0; it has to be left out: no as_model"),
    ],
)
def test_bench_refuses_another_bandwidth_where_nothing_is_emulated(flags: list[str], words: str) -> None:
    result = invoke("bench", "--bandwidth-gbit-s", "1", *flags)
    assert result.exit_code == 2
    assert words in result.stderr


def test_bench_serve_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.bench.serving import command

    seen: list[command.ServingOptions] = []
    monkeypatch.setattr(command, "run_bench_serve", seen.append)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    flags = [
        "--url",
        "http://a:1",
        "--model",
        "m",
        "--endpoint",
        "chat",
        "--request-rate",
        "2.5",
        "--burstiness",
        "0.5",
    ]
    flags += ["--concurrency", "1,2", "--num-prompts", "9", "--num-warmups", "0", "--dataset", "a.jsonl", "--seed", "3"]
    flags += ["--output-len", "7", "--temperature", "0.6", "--ignore-eos", "--goodput", "ttft:500", "--json", "a.json"]
    assert invoke("bench", "serve", *flags).exit_code == 0
    assert seen[0] == command.ServingOptions(
        server=Server(url="http://a:1/v1"),
        model="m",
        endpoint="chat",
        request_rate=2.5,
        burstiness=0.5,
        concurrency=(1, 2),
        num_prompts=9,
        num_warmups=0,
        dataset=Path("a.jsonl"),
        output_len=7,
        seed=3,
        temperature=0.6,
        ignore_eos=True,
        goodput={"ttft": 500.0},
        json=Path("a.json"),
    )
    assert invoke("bench", "serve", "--request-rate", "inf", "--api-key", "k").exit_code == 0
    assert seen[1] == command.ServingOptions(server=Server(api_key="k"))


@pytest.mark.parametrize("command", [["bench", "serve"], ["chat"]])
def test_a_wrong_address_is_refused(command: list[str]) -> None:
    result = invoke(*command, "--url", "localhost:8000")
    assert result.exit_code == 2
    assert "url is 'localhost:8000'; it has to begin with http://" in result.stderr


def test_simulate_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.bench.simulate import command as simulate

    seen: list[simulate.SimulateOptions] = []
    monkeypatch.setattr(simulate, "run_simulate", seen.append)
    flags = ["--cluster", "demo", "--cluster", "random-3", "--strategies", "auto, pipedec[width=4,children=2]"]
    flags += ["--accuracy", "0.5,0.7", "--tokens", "50", "--tokens-per-request", "10", "--sweep", "stages=2..8"]
    assert invoke("simulate", *flags).exit_code == 0
    assert (seen[0].clusters, seen[0].strategies) == (("demo", "random-3"), ("auto", "pipedec[width=4,children=2]"))
    assert (seen[0].accuracy, seen[0].tokens, seen[0].tokens_per_request) == ((0.5, 0.7), 50, 10)
    assert seen[0].sweep == {"stages": (2, 4, 8)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster", "dmo"], "did you mean 'demo'?"),
        (["--cluster", "local-2"], "cluster local-2 has no as_model"),
        (["--strategies", "pipdec"], "did you mean 'pipedec'?"),
        (["--strategies", "pipedec[widht=3]"], "did you mean 'width'?"),
        (["--accuracy", "0.9,0.5"], "none below the one before it"),
        (["--accuracy", "high"], "accuracy is 'high'; it has to be numbers with commas"),
        (["--tokens", "10"], "tokens is 10; it has to be at least tokens_per_request"),
        (["--sweep", "stagse=2..4"], "did you mean 'stages'?"),
        (["--sweep", "stages=2..6"], "doubling 2 does not lead to 6; end at 4 or 8"),
        (["--sweep", "segment=2..4"], "sweep is 'segment'; it has to be an option that one of static_tree, pipedec"),
        (["--cluster", "random-1", "--sweep", "stages=1..2"], "stages is 1; it has to be between 2 and 128"),
        (["--recording", "none.safetensors"], "none.safetensors: there is no such file"),
        (["--model", "demo"], "model is what recordings have to be made with, but there are none; add --recording"),
    ],
)
def test_simulate_refuses_what_it_cannot_simulate(flags: list[str], words: str) -> None:
    cluster = [] if "--cluster" in flags else ["--cluster", "demo"]
    result = invoke("simulate", *cluster, *flags)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["bench", "serve", "--help"],
        *([name, "--help"] for name in ("generate", "demo", "bench", "chat", "simulate", "compare", "trace")),
    ],
)
def test_help(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 0


def test_version_help_and_errors_do_not_wait_for_torch() -> None:
    code = """
import sys
from penstock.cli import app
for arguments in (["--version"], ["generate", "--help"], ["generate", "x", "--strategy", "no"]):
    try:
        app(arguments)
    except SystemExit:
        pass
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"penstock {penstock.__version__}\n")
