"""Stages on hosts with `penstock worker`: the same tokens, links of their own, and nothing left behind.

Each worker has an address of its own on this host, and keys of one cluster.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import LLM, AsyncLLM, ConfigError, PipelineError, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.engine.recovery import Recovery, Requests
from penstock.hosts.fleet import Fleet
from penstock.hosts.placement import HERE
from penstock.pipeline.processes import ProcessExecutor, ProcessPipeline
from tests import speculators
from tests.checkpoints import make_checkpoint
from tests.happening import AfterResults
from tests.serving import PATIENCE, PENSTOCK
from tests.warm import popen
from tests.workers import WarmWorker, Worker, ended, workers

pytestmark = pytest.mark.processes

PROMPTS = ["def f(x):", "class A:", "import os\n", "# "]
SAMPLED = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
GONE_S = 10.0
"""Seconds within which everything that a dead head has started must be gone."""


@pytest.fixture(scope="module")
def pair(keys: Path) -> Iterator[list[Worker]]:
    with workers(2, keys) as found:
        yield found


def named(*found: Worker) -> str:
    return ",".join(worker.host for worker in found)


def listening(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def dialled(process: psutil.Process) -> set[int]:
    """Ports to which the process has connected, as far as it does not listen there itself."""
    found = {one.raddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED}
    return found - listening(process)


def test_tokens_are_those_of_one_host(target: Path, pair: list[Worker], keys: Path) -> None:
    with LLM(target, max_model_len=256) as llm:
        plain = llm.generate(PROMPTS, SAMPLED)
    speculation = {"method": "ngram", "strategy": "continuous"}
    with LLM(target, max_model_len=256, hosts=named(*pair), keys=str(keys), speculative_config=speculation) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, SAMPLED)] == [
            one.outputs[0].token_ids for one in plain
        ]
        llm.loop.audit()
        (first,), (last,) = (worker.stages() for worker in pair)
        assert listening(last) & dialled(first)  # states go from stage to stage
        stages = [first, last]
    assert ended(stages, GONE_S)
    assert [worker.stages() for worker in pair] == [[], []]


def test_this_host_may_hold_stages_too(target: Path, pair: list[Worker], keys: Path, tmp_path: Path) -> None:
    """The drafter, an MTP head, is here as well: the states that it reads come from the other host."""
    head = speculators.mtp(open_checkpoint(str(target))).save(tmp_path)
    speculation = {"method": "mtp", "model": str(head), "strategy": "continuous"}
    prompt, greedy = PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"max_model_len": 256, "keys": str(keys)}
    with LLM(target, max_model_len=256) as llm:
        (plain,) = llm.generate(prompt, greedy)
    hosts = f"localhost,{pair[0].host}"
    with LLM(target, hosts=hosts, pipeline_parallel_size=3, speculative_config=speculation, **options) as llm:
        (same,) = llm.generate(prompt, greedy)
        assert llm.setup.hosts == ("", "", pair[0].host)
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids
    assert same.outputs[0].metrics.drafted_nodes > 0


def test_memory_that_does_not_suffice_is_refused_by_name(target: Path, pair: list[Worker], keys: Path) -> None:
    with pytest.raises(ConfigError, match=f"host {pair[0].host}: cpu has .* GB free, its stages need .* GB"):
        LLM(target, hosts=named(*pair), keys=str(keys), kv_slots=1 << 40)
    assert [worker.stages() for worker in pair] == [[], []]


def test_a_device_that_is_not_there_is_refused_by_name(target: Path, pair: list[Worker], keys: Path) -> None:
    with pytest.raises(ConfigError, match=f"host {pair[0].host} has no device 'cuda:7'"):
        LLM(target, hosts=named(*pair), keys=str(keys), device="cuda:7")


def test_whoever_has_no_keys_is_refused(target: Path, pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hosts.remote.ANSWER_S", 1.0)
    monkeypatch.setattr("penstock.hosts.fleet.ANSWER_S", 1.0)
    with pytest.raises(ConfigError, match=f"host {pair[0].host}"):
        LLM(target, hosts=named(*pair), insecure=True)


HEAD = """
import sys
from penstock import LLM, SamplingParams
target, hosts, keys = sys.argv[1:]
with LLM(target, max_model_len=256, hosts=hosts, keys=keys) as llm:
    print("started", flush=True)
    while True:
        llm.generate("x", SamplingParams(max_tokens=64, ignore_eos=True))
"""


def test_nothing_is_left_of_a_head_that_is_killed(target: Path, pair: list[Worker], keys: Path) -> None:
    command = [sys.executable, "-c", HEAD, str(target), named(*pair), str(keys)]
    with popen(command, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        assert head.stdout.readline() == "started\n"
        stages = [stage for worker in pair for stage in worker.stages()]
        assert len(stages) == 2
        head.kill()
    assert ended(stages, GONE_S)


def test_a_worker_that_is_killed_is_named(target: Path, pair: list[Worker], keys: Path) -> None:
    with (
        workers(1, keys) as (third,),
        LLM(target, max_model_len=256, hosts=named(pair[0], third), keys=str(keys), recovery_timeout=0.0) as llm,
    ):
        (stage,) = third.stages()
        stream = llm.stream("x", SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        third.kill()
        with pytest.raises(PipelineError, match="was lost"):
            list(stream)
        assert ended([stage], GONE_S)


def test_a_worker_that_dies_while_stages_start_is_done_without(
    target: Path, pair: list[Worker], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(target, max_model_len=256) as llm:
        plain = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, SAMPLED)]
    begin = ProcessExecutor.begin

    with workers(1, keys) as (third,):

        def dying(host: ProcessExecutor, *plans: Any) -> ProcessPipeline:
            begun = begin(host, *plans)
            if third._process.poll() is None:
                third.kill()
            return begun

        monkeypatch.setattr(ProcessExecutor, "begin", dying)
        with LLM(target, max_model_len=256, hosts=named(pair[0], third), keys=str(keys)) as llm:
            assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, SAMPLED)] == plain
            assert len(pair[0].stages()) == 2


def test_a_host_that_stands_still_while_the_others_get_their_layers_is_waited_for(
    target: Path, pair: list[Worker], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, (still,) = Fleet.ask, [pair[1].process]

    def asked(fleet: Fleet, *what: Any) -> None:
        monkeypatch.undo()
        still.suspend()
        while fleet.hosts[pair[1].host].attached:
            time.sleep(0.01)
        still.resume()
        ask(fleet, *what)

    monkeypatch.setattr(Fleet, "ask", asked)
    with LLM(target, max_model_len=256, hosts=named(*pair), keys=str(keys)) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=4))
        assert all(len(worker.stages()) == 1 for worker in pair)


OLD_PROCESSOR = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2"}


def test_a_host_that_cannot_be_exact_does_not_go_on_with_other_tokens(
    target: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker comes back on a processor without AVX2 in the middle of an answer that began with exact numerics."""
    fail, params = Recovery._fail, SamplingParams(max_tokens=40, ignore_eos=True)

    def failing(recovery: Recovery, loop: Requests, error: PipelineError) -> None:
        if "numerics" in str(error):
            recovery._timeout = 0.1  # it may have taken long until the host was back
        fail(recovery, loop, error)

    monkeypatch.setattr(Recovery, "_fail", failing)
    with workers(1, keys) as (worker,), ExitStack() as returned:

        def come_back() -> None:
            worker.kill()
            with monkeypatch.context() as old:
                for name, value in OLD_PROCESSOR.items():
                    old.setenv(name, value)
                returned.enter_context(closing(WarmWorker(worker.host, "--keys", str(keys))))

        options = {"max_model_len": 256, "hosts": worker.host, "keys": str(keys), "recovery_timeout": 120.0}
        with LLM(target, **options) as llm, llm.observing(AfterResults(7, come_back)):
            assert llm.numerics == "exact"
            with pytest.raises(PipelineError, match=r"no recovery within 0 s: .*numerics is 'exact', for which this"):
                llm.generate("def f(x):", params)


def test_hosts_are_listed(pair: list[Worker], keys: Path) -> None:
    names = f"{named(*pair)},127.0.0.9:1"
    command = [PENSTOCK, "hosts", names, "--keys", str(keys), "--links", "--json"]
    with popen(command, stdout=subprocess.PIPE, text=True) as process:
        listed = json.loads(process.communicate(timeout=PATIENCE)[0])
    assert process.returncode == 0
    assert [one["host"] for one in listed] == names.split(",")
    for one in listed[:2]:
        assert one["facts"]["devices"][0]["free"] > 0
        offset, error = one["clock"]
        assert abs(offset) <= error  # it is the same clock
        assert [(link["from"], link["to"]) for link in one["links"]] == [(HERE, one["host"]), (one["host"], HERE)]
        assert all(link["bandwidth_gbit_s"] > 0 for link in one["links"])
    assert "refused" in listed[2]["problem"]
    assert listed[2]["facts"] is None
    assert listed[2]["links"] is None


def test_the_stages_of_a_killed_worker_move_to_the_others(target: Path, pair: list[Worker], keys: Path) -> None:
    with LLM(target, max_model_len=256) as llm:
        plain = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, SAMPLED)]
    with (
        workers(1, keys) as (third,),
        LLM(target, max_model_len=256, hosts=named(pair[0], third), keys=str(keys)) as llm,
        llm.observing(AfterResults(7, third.kill)),
    ):
        (kept,) = pair[0].stages()
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, SAMPLED)] == plain
        assert [stage == kept for stage in pair[0].stages()] == [True, False]
        llm.loop.audit()
    assert pair[0].stages() == []


def test_a_command_whose_only_host_is_lost_amid_its_answer_reports_what_came_and_says_why_there_is_no_more(
    keys: Path, tmp_path: Path
) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", seed=2, tokenizer=True, max_position_embeddings=20_000)
    endless = ("--max-tokens", "19000", "--max-model-len", "20000", "--ignore-eos", "--temperature", "1")
    with workers(1, keys) as (only,):
        hosts = ("--hosts", only.host, "--keys", str(keys), "--recovery-timeout", "0.5")
        command = [sys.executable, "-m", "penstock.cli", "generate", "def f(x):", "--model", str(target), *hosts]
        command += [*endless, "--trace", str(tmp_path / "trace.json")]
        with popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.read(1), process.communicate()
            only.kill()
            _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert re.fullmatch(r"penstock: error: .*was lost.* no recovery within .*", errors.splitlines()[-1])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_server_outlives_all_its_hosts(target: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dies: requests go on. The other one, too: they end with an error. Both come back, one after the other."""
    monkeypatch.setattr("penstock.engine.recovery.LONGEST_DELAY", 0.5)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    with LLM(target, max_model_len=256) as llm:
        expected = llm.generate("def f(x):", params)[0].outputs[0].token_ids

    async def tokens(llm: AsyncLLM) -> list[int]:
        outputs = [output async for output in llm.generate("def f(x):", params)]
        return outputs[-1].outputs[0].token_ids

    async def run(first: Worker, other: Worker) -> None:
        names = f"{first.host},{other.host}"
        options = {"max_model_len": 256, "hosts": names, "keys": str(keys), "recovery_timeout": 60.0}
        async with AsyncLLM(target, **options) as llm:
            llm.observe(AfterResults(7, other.kill))
            assert await tokens(llm) == expected
            assert len(first.stages()) == 2
            llm.observe(AfterResults(7, first.kill))
            with monkeypatch.context() as impatient:
                impatient.setattr(llm._llm.loop.recovery, "_timeout", 0.5)
                with pytest.raises(PipelineError, match=r"was lost.* no recovery within 0 s: none of the hosts"):
                    await tokens(llm)
            with pytest.raises(PipelineError, match="no request is taken until hosts are back"):
                await llm.check_health()
            with closing(WarmWorker(first.host, "--keys", str(keys))) as again:
                await until(lambda: llm.stats().recovering is None)
                assert await tokens(llm) == expected
                assert len(again.stages()) == 2
                with closing(WarmWorker(other.host, "--keys", str(keys))) as also:
                    await until(lambda: len(also.stages()) == 1)
                    assert await tokens(llm) == expected
                    assert len(again.stages()) == 1
                    assert llm.stats().recoveries == 2

    with workers(2, keys) as found:
        asyncio.run(run(*found))


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
