"""A host whose stages send what no layers have made: it is the one that is lost, never the one that notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from tests.lying_stage import LIES, lying
from tests.workers import Worker, workers

pytestmark = pytest.mark.processes

PROMPTS = ["def f(x):", "class A:"]
SAMPLED = [SamplingParams(temperature=0.8, seed=seed, max_tokens=16, ignore_eos=True) for seed in range(2)]
SAMPLE = (("a NaN", 0), ("other nodes", 1), ("a number that no message holds", 0))
"""States, a header amid the pipeline, and what does not decode: a stage's complaint about each of the other lies is
tested over one link by test_processes.py; the whole matrix has all of them in both places."""


@dataclass
class Company:
    """Three hosts, of which one tells the lie that is named in a file."""

    liar: Worker
    honest: list[Worker]
    lie: Path


@pytest.fixture(scope="module")
def company(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    folder = tmp_path_factory.mktemp("lying")
    lie = folder / "lie"
    with ExitStack() as there:
        honest = there.enter_context(workers(2, keys))
        with pytest.MonkeyPatch.context() as patched:  # for the liar alone: this process may begin a fork server, too
            for name, value in lying(folder / "site", lie).items():
                patched.setenv(name, value)
            liar = there.enter_context(closing(Worker("127.0.0.9:0", "--keys", str(keys))))
        yield Company(liar, honest, lie)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with LLM(target, max_model_len=256, speculative_config=None) as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, SAMPLED)]


@pytest.mark.parametrize(
    ("lie", "place"),
    [
        pytest.param(lie, place, marks=[pytest.mark.whole] * ((lie, place) not in SAMPLE))
        for lie in LIES
        for place in (0, 1)
    ],
)
def test_the_host_that_lies_is_left_and_no_other(
    target: Path, keys: Path, company: Company, plain: list[list[int]], lie: str, place: int
) -> None:
    hosts = [worker.host for worker in company.honest]
    hosts.insert(place, company.liar.host)
    company.lie.write_text("")
    with LLM(target, max_model_len=256, hosts=",".join(hosts), keys=str(keys), speculative_config=None) as llm:
        assert tokens(llm) == plain
        company.lie.write_text(lie)
        assert tokens(llm) == plain
        lost = {name: host.cause for name, host in llm.host.fleet.hosts.items()}
        assert "stages there have failed 2 times: stage " in lost.pop(company.liar.host)
        assert set(lost.values()) == {""}
        llm.loop.audit()
