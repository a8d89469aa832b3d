"""Hosts with networks and clocks of their own: what is learned of them, and what a cut link leaves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from gguf import GGMLQuantizationType as Kind

from penstock import LLM, PipelineError, SamplingParams
from penstock.hosts import doctor as examining
from penstock.hosts.fetching import held_bytes
from penstock.hosts.listing import advice_of
from penstock.hosts.weights import files_of
from tests.agents import soon
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf, split_gguf
from tests.happening import AfterResults
from tests.namespaces import Namespace, network
from tests.workers import WarmWorker, Worker, ended

pytestmark = pytest.mark.processes

DAYS = 86_400.0
SIZE: Final = {"hidden_size": 256, "intermediate_size": 768}
SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=32, ignore_eos=True)
NOTICED_S = 5.0
"""Seconds within which a lost host is noticed on a host that has other things to do, too."""
GONE_S = 10.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Namespace]]:
    """Hosts whose clocks are ten days apart from each other and from the head's."""
    with network(10 * DAYS, 20 * DAYS) as found:
        yield found


@pytest.fixture(scope="module")
def workers(hosts: list[Namespace], keys: Path) -> Iterator[list[Worker]]:
    found: list[Worker] = []
    try:
        found += [WarmWorker(f"{one.address}:7700", "--keys", str(keys), place=one.place) for one in hosts]
        yield found
    finally:
        for worker in found:
            worker.close()


def over(workers: list[Worker], target: Path, keys: Path, **options: Any) -> LLM:
    names = ",".join(worker.host for worker in workers)
    speculation = {"method": "ngram"}
    return LLM(target, max_model_len=256, hosts=names, keys=str(keys), speculative_config=speculation, **options)


def test_clocks_that_differ_change_nothing(target: Path, workers: list[Worker], keys: Path) -> None:
    with LLM(target, max_model_len=256) as llm:
        (plain,) = llm.generate("def f(x):", SAMPLED)
    with over(workers, target, keys) as llm:
        (same,) = llm.generate("def f(x):", SAMPLED)
        assert same.outputs[0].token_ids == plain.outputs[0].token_ids
        begin = time.monotonic()
        llm.generate("def g(x):", SAMPLED)
        trips = llm.loop.estimates.round_trips
        assert 0 < trips.round_trip_s(1) < time.monotonic() - begin  # no days in it


def test_an_emulated_cluster_may_be_on_them(target: Path, workers: list[Worker], keys: Path) -> None:
    """A modelled link says when a message arrives, which no clock of another host tells."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
    with LLM(target, max_model_len=256) as llm:
        (plain,) = llm.generate("def f(x):", params)
    names = ",".join(worker.host for worker in workers)
    with LLM(target, max_model_len=256, cluster="demo", hosts=names, keys=str(keys)) as llm:
        (same,) = llm.generate("def f(x):", params)
        assert all(worker.stages() for worker in workers)
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids


def as_gguf(folder: Path) -> Path:
    return make_gguf(folder, kind=Kind.Q8_0, **SIZE)


CHECKPOINTS: Final[dict[str, Callable[[Path], Path]]] = {
    "one file": lambda folder: make_checkpoint(folder, tokenizer=True, **SIZE),
    "shards": lambda folder: make_checkpoint(folder, tokenizer=True, max_shard_size="1MB", **SIZE),
    "gguf": as_gguf,
    "split gguf": lambda folder: split_gguf(as_gguf(folder / "whole"), folder, 3)[0],
}


SENT: Final = ("shards",)
"""The kind of which a host holds some files and not others; the rest runs with the whole matrices."""


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.whole] * (one not in SENT)) for one in CHECKPOINTS]
)
def test_a_host_without_the_checkpoint_is_sent_its_layers(
    hosts: list[Namespace], keys: Path, tmp_path: Path, kind: str
) -> None:
    """An empty file system lies over the checkpoint there."""
    cache = tmp_path / "cache"
    checkpoint = CHECKPOINTS[kind](tmp_path / "checkpoint")
    place = replace(hosts[0].place, hidden=(str(tmp_path / "checkpoint"),))
    options = ("--keys", str(keys), "--cache", str(cache))
    with LLM(checkpoint, max_model_len=256) as llm:
        (plain,) = llm.generate("def f(x):", SAMPLED)
    with closing(WarmWorker(f"{hosts[0].address}:7701", *options, place=place)) as worker:
        names = f"localhost,{worker.host}"
        with LLM(checkpoint, max_model_len=256, hosts=names, keys=str(keys)) as llm:
            (same,) = llm.generate("def f(x):", SAMPLED)
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids
    (copy,) = cache.iterdir()
    assert held_bytes(copy) < sum(file.stat().st_size for file in files_of(checkpoint))


# Its parts are in the short suite: layers that are sent (above), and a host that returns (test_workers.py).
@pytest.mark.whole
def test_a_host_that_returns_with_nothing_changes_no_token(
    wide: Path, hosts: list[Namespace], keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies amid answers, its cache is lost, and it dies once more while it is sent its layers over 8 Mbit/s.

    It has its stage again once it holds its layers, and answers go on meanwhile.
    """
    monkeypatch.setattr("penstock.hosts.remote.TRY_AGAIN_S", 0.5)
    caches = [tmp_path / str(number) for number in range(2)]
    hidden = (str(wide),)

    def begun(number: int) -> Worker:
        options = ("--keys", str(keys), "--cache", str(caches[number]))
        return WarmWorker(f"{hosts[number].address}:7702", *options, place=replace(hosts[number].place, hidden=hidden))

    def returned(before: Worker) -> Worker:
        before.close()
        shutil.rmtree(caches[1], ignore_errors=True)  # it may have been killed before it had one
        return begun(1)

    with LLM(wide, max_model_len=256) as llm:
        (plain,) = llm.generate("x", SAMPLED)
    with closing(begun(0)) as steady, ExitStack() as there:
        worker = begun(1)
        there.callback(lambda: worker.close())
        hosts[1].receive_at("8mbit")
        there.callback(hosts[1].receives_unlimited)
        names = f"{steady.host},{worker.host}"
        llm = there.enter_context(LLM(wide, max_model_len=256, hosts=names, keys=str(keys)))

        def same() -> bool:
            return llm.generate("x", SAMPLED)[0].outputs[0].token_ids == plain.outputs[0].token_ids

        with llm.observing(AfterResults(7, worker.kill)):
            assert same()
        worker = returned(worker)
        soon(lambda: same() and worker.host in llm.host.fleet.searching)
        worker.kill()
        worker = returned(worker)
        soon(lambda: same() and bool(worker.stages()))
        assert same()
        assert len(steady.stages()) == 1
        llm.loop.audit()


def test_the_doctor_names_a_slow_link(
    hosts: list[Namespace], workers: list[Worker], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "NEEDED", 1 << 60)  # devices are not measured here
    slow = workers[1].host
    hosts[1].send_at("20mbit")
    try:
        report = examining.examine([one.host for one in workers], str(keys), False, lambda *step: None)
    finally:
        hosts[1].unlimited()
    rates = {(link.source, link.to): link.bandwidth_gbit_s for link in report.links}
    for to in ("localhost", workers[0].host):
        assert rates[slow, to] == pytest.approx(0.02, rel=0.2)
        assert any(said.startswith(f"{slow} to {to} carries") for said in advice_of(report))
    clock = next(one.clock for one in report.hosts if one.host == slow)
    assert clock is not None
    assert clock.seconds == pytest.approx(20 * DAYS, abs=2 * clock.error + 1.0)


def test_a_cut_link_leaves_nothing_and_the_host_comes_back(
    target: Path, hosts: list[Namespace], workers: list[Worker], keys: Path
) -> None:
    with closing(over(workers, target, keys, recovery_timeout=0.0)) as llm:
        (stage,) = workers[1].stages()
        fleet = llm.host.fleet
        before = fleet.living[workers[1].host]
        stream = llm.stream("x", SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        try:
            hosts[1].link("down")
            begin = time.monotonic()
            with pytest.raises(PipelineError, match=f"host {workers[1].host} was lost"):
                list(stream)
            assert time.monotonic() - begin < NOTICED_S
            assert ended([stage], GONE_S)
        finally:
            hosts[1].link("up")
        deadline = time.monotonic() + 30
        while workers[1].host not in fleet.living:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert fleet.living[workers[1].host].incarnation == before.incarnation


def test_a_cut_link_changes_no_token(target: Path, hosts: list[Namespace], workers: list[Worker], keys: Path) -> None:
    """The stages of the host that is gone move to the other one."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=100, ignore_eos=True)
    with LLM(target, max_model_len=256) as llm:
        (plain,) = llm.generate("x", params)
    with closing(over(workers, target, keys)) as llm:
        try:
            with llm.observing(AfterResults(7, lambda: hosts[1].link("down"))):
                (same,) = llm.generate("x", params)
            assert len(workers[0].stages()) == 2
        finally:
            hosts[1].link("up")
        assert same.outputs[0].token_ids == plain.outputs[0].token_ids
        llm.loop.audit()


def test_hosts_that_do_not_reach_each_other_are_not_used_together(
    target: Path, hosts: list[Namespace], workers: list[Worker], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection between two stages never comes up, though both answer the head."""
    with LLM(target, max_model_len=256) as llm:
        (plain,) = llm.generate("x", SAMPLED)
    with hosts[1].without_way_to(hosts[0]), closing(over(workers, target, keys)) as llm:
        (same,) = llm.generate("x", SAMPLED)
        assert len(workers[0].stages()) == 2
        soon(
            lambda: f"host {workers[1].host} was lost: stage 1" in caplog.text
        )  # at the fleet's next look at its hosts
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids
    assert "does not reach stage 0" in caplog.text
