"""Processes killed, stopped and cut off amid requests, which go on with the same tokens."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from penstock import LLM, AsyncLLM, PipelineError, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core import ConfigError
from penstock.engine.loop import Observer
from penstock.pipeline.base import StagePlan
from penstock.pipeline.forkserver import shared_fork_server
from penstock.pipeline.processes import ProcessExecutor, ProcessPipeline
from tests import speculators
from tests.checkpoints import make_checkpoint
from tests.conftest import noisy_copy
from tests.processes import alive, descendants
from tests.proxies import Proxy
from tests.serving import until
from tests.unit.models.compiled.formats import FORMATS

pytestmark = pytest.mark.processes

STAGES: Final = 2
PROMPTS: Final = [{"prompt_token_ids": [40 + i, 50, 60, 70]} for i in range(4)]
ANSWERS: Final = 20
"""Most answers in which a loss is noticed: a drafter that is killed at the end of one is missed in the next."""
GREEDY: Final = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 4
SAMPLED: Final = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of its layers carry a state, which is to be forgotten and computed anew like keys and values."""
    return make_checkpoint(tmp_path_factory.mktemp("target"), "qwen3_5", head_dim=8, initializer_range=0.2)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(target, tmp_path_factory.mktemp("draft") / "model", noise=0.05)


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[float, list[list[int]]]:
    """Return one stage's tokens of every prompt, by temperature."""
    with LLM(str(target), skip_tokenizer_init=True, speculative_config=None) as llm:
        return {params[0].temperature: tokens(llm, params) for params in (GREEDY, SAMPLED)}


def tokens(llm: LLM, params: Sequence[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def start(target: Path, **options: Any) -> LLM:
    return LLM(str(target), pipeline_parallel_size=STAGES, skip_tokenizer_init=True, **options)


def processes() -> list[psutil.Process]:
    """The fork server and what it has forked: a drafter with weights before the stages."""
    server = psutil.Process(shared_fork_server()._process.pid)
    return [server, *filter(alive, descendants(server.pid))]


class Attack(Observer):
    """Does something to the process at ``place`` once so many results have come, and once more."""

    def __init__(self, place: int, results: Sequence[int], hit: Callable[[psutil.Process], None]) -> None:
        self.place, self.results, self.hit = place, set(results), hit
        self.seen = 0

    def arrived(self, *told: Any) -> None:
        self.seen += 1
        if self.seen in self.results:
            self.hit(processes()[self.place])


def speculation(target: Path, draft: Path, folder: Path, method: str, strategy: str) -> dict[str, Any] | None:
    if method == "none":
        return None
    if method == "ngram":
        return {"method": method, "strategy": strategy}
    if method != "draft_model":
        options = {"spd": {"anchors": [0, 2, 4]}, "dflash": {"taps": [0, 2]}, "headrace": {"taps": [0, 2]}}.get(
            method, {}
        )
        draft = getattr(speculators, method)(open_checkpoint(str(target)), **options).save(folder / method)
    return {"method": method, "model": str(draft), "strategy": strategy}


KILLED: Final = {
    "stage": ("none", "", 2, SAMPLED),
    "stage-ngram": ("ngram", "auto", 1, GREEDY),
    "drafter": ("draft_model", "pipedec", 1, SAMPLED),
    "stage-drafter": ("draft_model", "static_tree", 2, SAMPLED),
    "fork-server": ("draft_model", "flowspec", 0, GREEDY),
    "eagle3": ("eagle3", "continuous", 1, SAMPLED),
    "stage-spd": ("spd", "continuous", 3, SAMPLED),
    "stage-mtp": ("mtp", "continuous", 3, SAMPLED),
    "dflash": ("dflash", "continuous", 1, SAMPLED),
    "headrace": ("headrace", "continuous", 1, SAMPLED),
    "stage-headrace": ("headrace", "pipedec", 3, GREEDY),
    "peagle": ("peagle", "continuous", 1, GREEDY),
    "stage-peagle": ("peagle", "pipedec", 3, SAMPLED),
}
SAMPLE: Final = ("stage", "stage-ngram", "drafter")
"""A stage without and amid speculation, and a drafter. A stage beside a learned drafter is killed further below, and a
fork server in test_fork_from_here.py; every kind of drafter runs with the whole matrices."""


@pytest.mark.parametrize(
    ("method", "strategy", "place", "params"),
    [pytest.param(*KILLED[one], id=one, marks=[pytest.mark.whole] * (one not in SAMPLE)) for one in KILLED],
)
def test_tokens_are_the_same_whatever_is_killed(
    target: Path,
    draft: Path,
    tmp_path: Path,
    expected: dict[float, list[list[int]]],
    method: str,
    strategy: str,
    place: int,
    params: Sequence[SamplingParams],
) -> None:
    config = speculation(target, draft, tmp_path, method, strategy)
    rng = random.Random(f"{method} {place}")
    results = sorted(rng.sample(range(5, 40), 2 if place else 1))
    with start(target, speculative_config=config) as llm:
        recovery = llm.loop.recovery
        assert recovery is not None
        with llm.observing(Attack(place, results, psutil.Process.kill)):
            for _ in range(ANSWERS):
                assert tokens(llm, params) == expected[params[0].temperature]
                if recovery.recoveries + recovery.drafter_losses:
                    break
        assert recovery.recoveries + recovery.drafter_losses >= 1
        llm.loop.audit()
        assert tokens(llm, params) == expected[params[0].temperature]
    assert len(processes()) == 1


FORM: Final = "int4"
"""The format of weights that is computed in the most steps; that rows stand for themselves in each of them is tested
by tests/unit/models/compiled/, too."""


@pytest.mark.parametrize("form", [pytest.param(one, marks=[pytest.mark.whole] * (one != FORM)) for one in FORMATS])
def test_tokens_are_the_same_in_every_format_of_weights(tmp_path: Path, form: str) -> None:
    """A row is computed anew among others than before: in a prompt that has grown, and beside other requests' rows."""
    path = make_checkpoint(tmp_path, "llama3_rope", initializer_range=0.2)
    with LLM(str(path), skip_tokenizer_init=True, speculative_config=None, **FORMATS[form]) as llm:
        assert llm.numerics == "exact"
        plain = {params[0].temperature: tokens(llm, params) for params in (GREEDY, SAMPLED)}
    with start(path, speculative_config={"method": "ngram", "strategy": "continuous"}, **FORMATS[form]) as llm:
        for params in (GREEDY, SAMPLED):
            with llm.observing(Attack(-1, [7], psutil.Process.kill)):
                assert tokens(llm, params) == plain[params[0].temperature]
        assert llm.loop.recovery is not None
        assert llm.loop.recovery.recoveries == 2


# Beside a learned drafter more processes live on; a stage alone is killed above.
@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.whole), "eagle3"])
def test_what_lives_keeps_its_process_and_its_weights(
    target: Path, draft: Path, tmp_path: Path, expected: dict[float, list[list[int]]], method: str
) -> None:
    """A stage is killed twice: one that was called into another session can be called into a third."""
    with start(target, speculative_config=speculation(target, draft, tmp_path, method, "continuous")) as llm:
        before = processes()
        for _ in range(2):
            with llm.observing(Attack(-1, [7], psutil.Process.kill)):
                assert tokens(llm, SAMPLED) == expected[0.8]
        assert llm.loop.recovery is not None
        assert llm.loop.recovery.recoveries == 2
        after = processes()
        assert after[:-1] == before[:-1]
        assert after[-1] not in before
        llm.loop.audit()


@pytest.mark.parametrize("drafts", [False, True])
def test_a_checkpoint_that_has_changed_is_not_loaded_again(
    target: Path, draft: Path, tmp_path: Path, expected: dict[float, list[list[int]]], drafts: bool
) -> None:
    """A stage that is started again would compute with other weights than its neighbours, or the drafter's."""
    own = Path(shutil.copytree(target, tmp_path / "target"))
    drafting = Path(shutil.copytree(draft, tmp_path / "draft"))
    config = {"method": "draft_model", "model": str(drafting)} if drafts else None
    with start(own, speculative_config=config) as llm:
        assert tokens(llm, SAMPLED) == expected[0.8]
        changed = (drafting if drafts else own) / "model.safetensors"
        changed.with_suffix(".new").write_bytes(bytes(changed.stat().st_size))
        changed.with_suffix(".new").replace(changed)
        with llm.observing(Attack(-1, [7], psutil.Process.kill)), pytest.raises(PipelineError) as raised:
            tokens(llm, SAMPLED)
        assert f"{changed} has changed since the engine started; start it again" in str(raised.value)


def test_a_drafter_whose_files_have_changed_is_done_without(
    target: Path, draft: Path, tmp_path: Path, expected: dict[float, list[list[int]]]
) -> None:
    """The stages have their weights: an answer goes on when only the drafter is lost and cannot be loaded again."""
    drafting = Path(shutil.copytree(draft, tmp_path / "draft"))
    with start(target, speculative_config={"method": "draft_model", "model": str(drafting)}) as llm:
        changed = drafting / "model.safetensors"
        changed.with_suffix(".new").write_bytes(bytes(changed.stat().st_size))
        changed.with_suffix(".new").replace(changed)
        recovery = llm.loop.recovery
        assert recovery is not None
        with llm.observing(Attack(1, [7], psutil.Process.kill)):
            for _ in range(ANSWERS):
                assert tokens(llm, SAMPLED) == expected[0.8]
                if recovery.drafter_losses:
                    break
        assert (recovery.recoveries, recovery.drafter_losses) == (0, 1)
        assert tokens(llm, SAMPLED) == expected[0.8]
        llm.loop.audit()


@pytest.mark.whole  # two faults at once; each alone is in the tests beside it
def test_a_stage_that_does_not_answer_is_given_up(
    target: Path, expected: dict[float, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed while the other one is stopped, which shows only when it is called."""
    monkeypatch.setattr("penstock.pipeline.processes.LEAST_PATIENCE", 1.0)

    def stop_the_other(process: psutil.Process) -> None:
        processes()[2].suspend()
        process.kill()

    with start(target, speculative_config=None) as llm:
        before = processes()
        with llm.observing(Attack(1, [7], stop_the_other)):
            assert tokens(llm, SAMPLED) == expected[0.8]
        assert set(before[1:]).isdisjoint(processes())
    assert len(processes()) == 1


def test_a_stopped_stage_is_noticed_and_replaced(
    target: Path, expected: dict[float, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.loss.LEAST_PATIENCE", 2.5)
    with start(target, speculative_config=None) as llm:
        assert tokens(llm, SAMPLED) == expected[0.8], "now it is known how long a batch takes"
        with llm.observing(Attack(1, [5], psutil.Process.suspend)):
            assert tokens(llm, SAMPLED) == expected[0.8]
        assert llm.loop.recovery is not None
        assert llm.loop.recovery.recoveries == 1


class CutExecutor(ProcessExecutor):
    """A host whose first pipeline has a proxy between its stages."""

    def __init__(self) -> None:
        super().__init__("tcp")
        self.proxies: list[Proxy] = []

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> ProcessPipeline:
        return CutPipeline(plans, self, name)


class CutPipeline(ProcessPipeline):
    _host: CutExecutor

    def _neighbours(self, index: int) -> tuple[str, str]:
        upstream, downstream = super()._neighbours(index)
        if index == 0 and not self._executor.proxies:
            self._executor.proxies.append(Proxy(downstream))
            downstream = self._executor.proxies[0].address
        return upstream, downstream


def test_a_connection_that_breaks_between_living_stages_is_reported(
    target: Path, expected: dict[float, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    host = CutExecutor()
    attack = Attack(1, [9], lambda _: host.proxies[0].cut())
    with start(target, host=host, speculative_config=None) as llm, llm.observing(attack):
        assert tokens(llm, SAMPLED) == expected[0.8]
    assert "stage 1 (layers 3-4) was lost: a connection to it has ended" in caplog.text


def test_streams_pause_while_a_stage_is_replaced(target: Path, expected: dict[float, list[list[int]]]) -> None:
    async def read(llm: AsyncLLM, i: int) -> list[int]:
        """Collect the deltas rather than the final output: a token that was sent twice would be here twice."""
        got: list[int] = []
        async for new in llm.submit(PROMPTS[i], SAMPLED[i]):
            got += [token for delta in new.deltas for token in delta.token_ids]
        return got

    async def run() -> None:
        options: Any = {"pipeline_parallel_size": STAGES, "skip_tokenizer_init": True, "max_num_seqs": 4}
        async with AsyncLLM(str(target), speculative_config={"method": "ngram"}, **options) as llm:
            attack = Attack(1, [7, 25], psutil.Process.kill)
            llm.observe(attack)
            assert await asyncio.gather(*(read(llm, i) for i in range(4))) == expected[0.8]
            await llm.check_health()
            stats = llm.stats()
            assert (stats.recoveries, stats.recovering, stats.ended) == (2, None, None)
            assert stats.recovery_seconds > 0

    asyncio.run(run())


# A learned drafter has the most to give back and to take again: stages, drafter and what passes between them.
@pytest.mark.parametrize(
    "method",
    ["eagle3", *(pytest.param(one, marks=pytest.mark.whole) for one in ("none", "ngram", "draft_model", "spd", "mtp"))],
)
def test_an_idle_engine_holds_no_process_and_goes_on_with_the_same_tokens(
    target: Path, draft: Path, tmp_path: Path, expected: dict[float, list[list[int]]], method: str
) -> None:
    config = speculation(
        target, draft, tmp_path, method, "continuous" if method in ("eagle3", "spd", "mtp") else "auto"
    )

    async def asked(engine: AsyncLLM) -> list[list[int]]:
        streams = [engine.submit(prompt, one) for prompt, one in zip(PROMPTS, SAMPLED, strict=True)]
        for stream in streams:
            await stream.ended()
        return [stream.output().outputs[0].token_ids for stream in streams]

    async def through(engine: AsyncLLM) -> None:
        for _ in range(2):
            assert await asked(engine) == expected[0.8]
            while not engine.stats().resting:
                await asyncio.sleep(0.05)
            assert len(processes()) == 1  # the fork server
            await engine.check_health()
            assert engine.stats().resting

    options = {"pipeline_parallel_size": STAGES, "skip_tokenizer_init": True, "speculative_config": config}
    with closing(AsyncLLM(str(target), idle_timeout=0.2, **options)) as engine:
        asyncio.run(through(engine))
        assert engine.stats().recoveries == 0


def test_an_engine_that_rests_can_be_closed(target: Path) -> None:
    options = {"skip_tokenizer_init": True, "speculative_config": None}
    with closing(AsyncLLM(str(target), idle_timeout=0.05, **options)) as engine:
        until(lambda: engine.stats().resting)
    with pytest.raises(ConfigError, match="idle_timeout is 0; it has to be a number of seconds above 0"):
        AsyncLLM(str(target), idle_timeout=0, **options)
