"""Stages whose ranks are on several hosts: the tokens of one, also where a rank's host is killed amid an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from penstock import LLM, SamplingParams
from penstock.models.linear import works
from penstock.pipeline.base import StageSpec
from penstock.pipeline.stage_process import StageProcess
from tests.happening import AfterResults
from tests.proxies import Proxy
from tests.workers import WarmWorker, Worker, ended, workers

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need"),
]

TEXTS: Final = ["def read_lines(path):", "class Stack:", "import os\n"]
PARAMS: Final = [
    SamplingParams(temperature=0.0, max_tokens=32, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=32, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=24),
]
GONE_S: Final = 10.0


def answers(llm: LLM) -> list[Any]:
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(TEXTS, PARAMS)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM("demo", quantization="int8", speculative_config=None) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def four(keys: Path) -> Iterator[list[Worker]]:
    with workers(4, keys) as found:
        yield found


def over(found: list[Worker], keys: Path, **options: Any) -> LLM:
    hosts = ",".join(worker.host for worker in found)
    return LLM("demo", quantization="int8", hosts=hosts, keys=str(keys), **options)


# Three hosts are the sample, of which one has two ranks; two have a rank each where one of them is killed, below.
@pytest.mark.parametrize(
    ("count", "stages", "strategy"),
    [
        pytest.param(2, 1, None, marks=pytest.mark.whole),
        pytest.param(4, 2, "pipedec", marks=pytest.mark.whole),
        (3, 2, "continuous"),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    expected: list[Any], four: list[Worker], keys: Path, count: int, stages: int, strategy: str | None
) -> None:
    """With three hosts the first stage's ranks share one."""
    speculation = strategy and {"strategy": strategy, "method": "draft_model"}
    with over(
        four[:count], keys, pipeline_parallel_size=stages, tensor_parallel_size=2, speculative_config=speculation
    ) as llm:
        for _ in range(2):  # the second time with what the prefix cache holds
            assert answers(llm) == expected
        held = llm.loop.pipeline.rank_bytes
        assert [len(ranks) for ranks in held] == [2] * stages
        assert 0 < held[0][1] < held[0][0]  # the first one has the embedding, too
        started = [stage for worker in four[:count] for stage in worker.stages()]
    assert ended(started, GONE_S)
    assert [worker.stages() for worker in four] == [[]] * 4


def test_a_cluster_file_says_which_devices_are_ranks(
    expected: list[Any], four: list[Worker], keys: Path, tmp_path: Path
) -> None:
    """One stage over two hosts, one of two ranks on this host, and one of a single device."""
    places = {"a": four[0].host, "b": four[1].host, "c": "localhost", "d": "localhost", "e": four[2].host}
    devices = "".join(f'[[devices]]\nname = "{name}"\nhost = "{host}"\nthreads = 1\n' for name, host in places.items())
    stages = '{ devices = ["a", "b"], split = "tensors" }, { devices = ["c", "d"], split = "tensors" }'
    file = tmp_path / "groups.toml"
    file.write_text(f'name = "groups"\nstages = [{stages}, {{ devices = ["e"] }}]\n{devices}')
    with LLM("demo", quantization="int8", cluster=str(file), keys=str(keys), speculative_config=None) as llm:
        assert answers(llm) == expected
        assert [len(worker.stages()) for worker in four] == [1, 1, 1, 0]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.whole), 3])
def test_the_host_of_a_rank_is_killed_amid_an_answer(expected: list[Any], keys: Path, victim: int) -> None:
    """The first rank of the first stage, or the other rank of the last one: a neighbour takes the share."""
    with (
        workers(4, keys) as found,
        over(found, keys, pipeline_parallel_size=2, tensor_parallel_size=2, speculative_config=None) as llm,
    ):
        with llm.observing(AfterResults(15, found[victim].kill)):
            assert answers(llm) == expected
        assert llm.loop.recovery.recoveries == 1
        assert found[victim].host not in llm.loop.recovery.parts._setup.all_hosts  # type: ignore[attr-defined]
        assert answers(llm) == expected


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.whole), 1])
def test_a_rank_that_is_killed_is_started_again_where_it_was(
    expected: list[Any], four: list[Worker], keys: Path, victim: int
) -> None:
    with over(four[:2], keys, pipeline_parallel_size=1, tensor_parallel_size=2, speculative_config=None) as llm:
        rank = four[victim].stages()[0]
        with llm.observing(AfterResults(15, rank.kill)):
            assert answers(llm) == expected
        assert llm.loop.recovery.recoveries == 1
        assert [len(worker.stages()) for worker in four] == [1, 1, 0, 0]


@pytest.mark.whole  # a rank whose link is cut is in tests/unit/stage/test_linked.py, a stage that is lost above
def test_a_link_that_is_cut_between_two_living_ranks_loses_the_stage(
    expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank reaches the first one through a proxy, which ends amid an answer; nothing is encrypted."""
    proxies: list[Proxy] = []
    meet = StageProcess.meet

    def meet_through_a_proxy(first: StageProcess, spec: StageSpec, address: str, bind: Callable[[str], str]) -> None:
        if not proxies:
            proxies.append(Proxy(address))
            address = proxies[0].address
        meet(first, spec, address, bind)

    monkeypatch.setattr(StageProcess, "meet", meet_through_a_proxy)
    with ExitStack() as there:
        found: list[Worker] = [WarmWorker(f"127.0.0.{number}:0", "--insecure") for number in (8, 9)]
        for worker in found:
            there.callback(worker.close)
        options: dict[str, Any] = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "speculative_config": None}
        hosts = ",".join(worker.host for worker in found)
        llm = there.enter_context(LLM("demo", quantization="int8", hosts=hosts, insecure=True, **options))
        before = [stage for worker in found for stage in worker.stages()]
        assert len(before) == 2
        with llm.observing(AfterResults(15, lambda: proxies[0].cut())):
            assert answers(llm) == expected
        assert llm.loop.recovery.recoveries == 1
        assert ended(before, GONE_S)
        assert answers(llm) == expected
