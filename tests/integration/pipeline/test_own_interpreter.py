"""Stages in interpreters of their own, as those on GPUs are; here on the processor, where the fork server forks others.

A probe that every new interpreter runs first notes its environment, and what it has imported by then.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from msgspec.structs import replace

from penstock import LLM, SamplingParams
from penstock.core import PipelineLost
from penstock.pipeline import forkserver
from penstock.pipeline.forkserver import ForkServer, close_shared, shared_fork_server
from penstock.pipeline.processes import ProcessExecutor, ProcessPipeline
from tests.agents import spec
from tests.happening import AfterResults
from tests.integration.pipeline.test_processes import alive, gone, pipeline_of, stage_processes, start
from tests.processes import descendants
from tests.serving import until

pytestmark = pytest.mark.processes

PROBE: Final = """
import json, os, sys
told = {"environment": dict(os.environ), "modules": list(sys.modules), "parent": os.getppid()}
with open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.json"), "w") as file:
    json.dump(told, file)
"""
GPU: Final = {"CUDA_VISIBLE_DEVICES": "GPU-ab22"}
PROMPTS: Final = [{"prompt_token_ids": [40 + i, 50, 60, 70]} for i in range(2)]
SAMPLED: Final = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(2)]

Noted = Callable[[], list[dict[str, Any]]]
"""Returns what the interpreters that the fork server has started have noted, the oldest first."""


@pytest.fixture
def noted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    close_shared()  # the next one is started with the probe
    folder = tmp_path_factory.mktemp("probe")
    (folder / "sitecustomize.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def read() -> list[dict[str, Any]]:
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        told = [json.loads(file.read_text()) for file in files]
        return [one for one in told if one["parent"] == shared_fork_server()._process.pid]

    yield read
    close_shared()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every stage start as one on a GPU does."""
    monkeypatch.setattr(forkserver, "fresh_environment", lambda plan: GPU)


def tokens(llm: LLM) -> list[Sequence[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLED)]


def join(host: ProcessExecutor, pipeline: ProcessPipeline) -> None:
    while not pipeline.joined():
        host.wait(pipeline.due)


def test_they_have_the_tokens_of_forks_and_their_environment_first_are_replaced_and_end_with_their_server(
    target: Path, noted: Noted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each takes seconds to start, so that those of one engine are asked everything; its first stage is a fork."""
    with start(target, 2) as llm:
        expected = tokens(llm)
        assert noted() == [], "stages on a processor are forks"
    monkeypatch.setattr(forkserver, "fresh_environment", lambda plan: GPU if plan.first else None)
    with start(target, 2, recovery_timeout=300.0) as llm:
        assert tokens(llm) == expected
        check_environment(noted(), 1)

        survivor, victim = stage_processes()
        with llm.observing(AfterResults(3, victim.kill)):
            assert tokens(llm) == expected
        assert re.search(r"stage 1 .*killed by signal 9 \(SIGKILL\)", caplog.text)
        assert survivor in stage_processes()
        check_environment(noted(), 2)

        stages = stage_processes()
        assert len(stages) == 2
        psutil.Process(shared_fork_server()._process.pid).kill()
        until(lambda: not any(alive(stage) for stage in stages))


def check_environment(stages: list[dict[str, Any]], count: int) -> None:
    """Check that so many interpreters had the stages' environment before anything was imported."""
    assert len(stages) == count
    for one in stages:
        assert one["environment"].items() >= {**GPU, **forkserver.GPUS, "OMP_NUM_THREADS": "1"}.items()
        assert not {"torch", "numpy", "penstock"} & set(one["modules"])


@pytest.mark.whole  # the environment of a stage on a GPU is told by tests/unit/pipeline/test_forkserver.py, too
def test_a_stage_on_a_gpu_begins_with_that_gpu_alone(target: Path, noted: Noted) -> None:
    """This torch finds none, and the stage says so."""
    with start(target, 1) as llm:
        plans = [replace(plan, device="cuda:1", gpu="GPU-ab22") for plan in pipeline_of(llm)._plans]
    host = ProcessExecutor()
    pipeline = host.begin(plans)
    with pytest.raises(PipelineLost, match=r"stage 0 \(layers .*\) was lost: .*CUDA"):
        join(host, pipeline)
    pipeline.close()
    host.close()
    (stage,) = noted()
    assert stage["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-ab22"


@pytest.mark.usefixtures("apart")
def test_a_stage_that_is_starting_ends_with_its_fork_server() -> None:
    """It has yet to introduce itself, so that the engine learns of it only after the server's death."""
    server = ForkServer()
    told, pipe = os.pipe()
    server.listen("p", pipe)
    server.start(spec("p"))
    until(lambda: bool(descendants(server._process.pid)))
    (stage,) = descendants(server._process.pid)
    psutil.Process(server._process.pid).kill()
    report = json.loads(os.read(told, 65536))
    server._thread.join()
    for end in (told, pipe):
        os.close(end)
    assert report == {"process": "p", "cause": "the fork server died"}
    assert not alive(stage)
    assert not Path(server.folder).exists()


@pytest.mark.usefixtures("apart")
def test_a_stage_may_be_killed_before_it_has_said_anything() -> None:
    server = shared_fork_server()
    told, pipe = os.pipe()
    server.listen("p", pipe)
    server.start(spec("p"))
    server.kill("p")
    report = json.loads(os.read(told, 65536))
    server.forget("p")
    for end in (told, pipe):
        os.close(end)
    assert report == {"process": "p", "cause": "killed by signal 9 (SIGKILL)"}
    assert gone([one.pid for one in stage_processes()])
