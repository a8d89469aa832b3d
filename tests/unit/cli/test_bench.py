"""``penstock bench`` and ``penstock bench serve``: what their flags come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.clients.api import Server
from penstock.lab import serving as serving_command
from penstock.lab.bench import command
from penstock.lab.grid import DEFAULT_PROMPTS, BenchOptions
from penstock.lab.serving_load import ServingOptions
from tests.unit.cli.invoke import invoke


def test_defaults_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchOptions | ServingOptions] = []
    monkeypatch.setattr(command, "run_bench", seen.append)
    monkeypatch.setattr(serving_command, "run_bench_serve", seen.append)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert invoke("bench").exit_code == invoke("bench", "serve").exit_code == 0
    assert seen == [BenchOptions(speculative_config={}), ServingOptions()]


def test_bench_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchOptions] = []
    monkeypatch.setattr(command, "run_bench", seen.append)
    flags = ["--cluster", "demo", "--strategies", "autoregressive, pipedec", "--num-prompts", "2", "--top-k", "3"]
    assert invoke("bench", *flags).exit_code == 0
    assert seen[0].strategies == ("autoregressive", "pipedec")
    assert seen[0].speculative_config == {}
    assert (seen[0].cluster, seen[0].num_prompts, seen[0].top_k) == ("demo", 2, 3)
    assert (seen[0].prompts, seen[0].temperature, seen[0].seeds) == ((DEFAULT_PROMPTS,), (0.0,), 1)
    assert invoke("bench", "--strategies", "autoregressive").exit_code == 0
    assert not seen[1].speculative_config
    flags = ["--prompts", "a.jsonl", "--prompts", "b.jsonl", "--temperature", "0,0.6", "--seeds", "3"]
    assert invoke("bench", "--strategies", "pipedec[width=4,children=2],pipedec", *flags).exit_code == 0
    assert seen[2].strategies == ("pipedec[width=4,children=2]", "pipedec")
    assert seen[2].prompts == (Path("a.jsonl"), Path("b.jsonl"))
    assert (seen[2].temperature, seen[2].seeds) == ((0.0, 0.6), 3)


@pytest.mark.parametrize("flags", [["--cluster", "demo"], ["--num-prompts", "2"]])
def test_options_before_the_subcommand_are_refused(flags: list[str]) -> None:
    result = invoke("bench", *flags, "serve")
    assert result.exit_code == 2
    assert f"{flags[0]} stands before serve" in result.stderr


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
    seen: list[ServingOptions] = []
    monkeypatch.setattr(serving_command, "run_bench_serve", seen.append)
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
    assert seen[0] == ServingOptions(
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
    assert seen[1] == ServingOptions(server=Server(api_key="k"))
