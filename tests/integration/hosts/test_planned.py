"""``layer_split="auto"`` on real hosts: it measures once, keeps what it found, and the tokens stay the same."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock import LLM, SamplingParams
from penstock.engine.profile import measure
from penstock.lab.plan import run_plan
from penstock.lab.plan_choices import PlanOptions
from tests.workers import workers

pytestmark = pytest.mark.processes

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = list(range(1, 190))


def test_layers_go_where_the_plan_says_and_tokens_stay(
    target: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = {"prompt_token_ids": LONG}
    with LLM(target, max_model_len=256) as llm:
        (plain,) = llm.generate(prompt, GREEDY)
    with workers(1, keys) as (worker,):
        # The head keeps what it has measured; the worker, which is begun before, keeps only compiled code.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(measure, "REPEATS", (1, 1))  # here; how right the times are is not asked
        names = f"localhost,{worker.host}"
        for start in range(2):
            caplog.clear()
            with LLM(target, max_model_len=256, hosts=names, keys=str(keys), layer_split="auto") as llm:
                (same,) = llm.generate(prompt, GREEDY)
                assert llm.setup.prefill_times is not None
                llm.loop.audit()
            assert same.outputs[0].token_ids == plain.outputs[0].token_ids
            measured = [line for line in caplog.messages if line.startswith("measuring")]
            assert len(measured) == (3 if start == 0 else 0), "two devices and the links, once"
            assert sum(line.startswith("layers are split ") for line in caplog.messages) == 1
        console = Console(file=io.StringIO(), width=200)
        options = {"model": str(target), "hosts": names, "keys": str(keys), "max_model_len": 256, "tokens": 0}
        planned = run_plan(PlanOptions(**options, data_parallel_size=2), console=console)
        clusters = [one.chosen.cluster for one in planned]
        assert [[one.device(stage.devices[0]).host for stage in one.stages] for one in clusters] == [
            ["localhost"],
            [worker.host],
        ]
        assert f"Run all with --data-parallel-size 2 --hosts {names} --layer-split auto" in console.file.getvalue()
