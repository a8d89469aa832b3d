"""The engine's inbox: what ends its wait, and who hears of stages that load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock import LLM
from penstock.messages import Loading, Started
from penstock.pipeline.base import Elsewhere
from penstock.pipeline.processes import ProcessExecutor
from penstock.transport.addresses import token_of
from tests import links
from tests.links import SESSION
from tests.serving import PATIENCE

pytestmark = pytest.mark.processes


@pytest.fixture
def host() -> Iterator[ProcessExecutor]:
    made = ProcessExecutor()
    yield made
    made.close()


def test_a_wake_ends_the_wait_under_way_or_the_next_one_and_no_other(host: ProcessExecutor) -> None:
    host.wake()
    host.wake()
    host.wait(None)
    until = host.now() + 0.002
    host.wait(until)
    assert host.now() >= until
    other = threading.Timer(0.01, host.wake)
    other.start()
    host.wait(None)
    other.join()


@pytest.mark.parametrize("until", [None, 3600.0])
def test_a_wake_between_a_wait_that_found_nothing_and_its_messages_is_not_lost(
    host: ProcessExecutor, monkeypatch: pytest.MonkeyPatch, until: float | None
) -> None:
    inbox_wait = host.inbox.wait

    def woken_just_after(moment: float | None) -> None:
        inbox_wait(host.now())  # the moment of a check for silent stages, for one
        host.wake()

    monkeypatch.setattr(host.inbox, "wait", woken_just_after)
    ended = threading.Event()

    def wait() -> None:
        host.wait(None if until is None else host.now() + until)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(PATIENCE)


def test_a_broken_connection_ends_the_wait(host: ProcessExecutor) -> None:
    broken: list[str] = []
    host.register(SESSION, lambda *_: False, lambda: broken.append(SESSION), lambda _: False)
    links.connected(host.inbox, token_of(SESSION)).close()
    host.wait(None)
    assert broken == [SESSION]


def test_a_wake_never_blocks_and_never_fails(host: ProcessExecutor) -> None:
    for _ in range(100_000):
        host.wake()
    host.wait(None)
    host.close()
    host.wake()


def test_a_host_whose_stages_fail_twice_is_cut_off() -> None:
    lost: list[tuple[str, str]] = []
    elsewhere = Elsewhere({}, "127.0.0.1", lambda host, cause: lost.append((host, cause)), private_network=True)
    with closing(ProcessExecutor("tcp", elsewhere=elsewhere)) as made:
        made.faults.note("a", "no memory")
        made.faults.note("b", "no memory")
        assert lost == []
        made.faults.note("a", "not finite")
        assert lost == [("a", "stages there have failed 2 times: not finite")]
        made.faults.note("a", "not finite")
        assert len(lost) == 1


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_stages_say_how_much_of_their_weights_they_have_read(target: Path, draft: Path, transport: str) -> None:
    told: list[tuple[str, str, Loading | Started]] = []
    host = ProcessExecutor(transport, on_loading=lambda *words: told.append(words))
    speculation = {"method": "draft_model", "model": str(draft)}
    with LLM(target, pipeline_parallel_size=2, speculative_config=speculation, host=host, max_model_len=64) as llm:
        weights = [started.weight_bytes // 4 for started in llm.loop.pipeline.started.values()]
    assert {(name, said.stage): type(said) for _, name, said in told} == dict.fromkeys(
        [("draft model", 0), ("stage", 0), ("stage", 1)], Started
    )
    last = {(name, said.stage): said for _, name, said in told if isinstance(said, Loading)}
    assert last.keys() == {("draft model", 0), ("stage", 0), ("stage", 1)}
    assert all(loading.read == loading.total for loading in last.values())
    assert [last["stage", stage].total >= weights[stage] for stage in (0, 1)] == [True, True]
