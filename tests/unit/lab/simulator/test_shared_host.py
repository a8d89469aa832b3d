"""Stages that share a host's cores and memory, and what `auto` makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from penstock.cluster import Cluster, load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.config import FieldError
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import Computing, SharedHost, simulate
from penstock.pipeline.base import VirtualClock
from penstock.speculation import SpeculativeConfig

GOOD, FAIR, POOR, WRONG = (0.9, 0.95), (0.6, 0.8), (0.3, 0.4), (0.0, 0.0)


@pytest.fixture
def two_stages() -> Cluster:
    return uniform_cluster(load_cluster("spd-8"), 2)


def seconds(cluster: Cluster, script: Script, strategy: str | None, host: SharedHost | None = None) -> float:
    speculation = SpeculativeConfig(strategy=strategy) if strategy is not None else None
    return sum(run.seconds for run in simulate(cluster, script, speculation, host=host))


@cache
def script_of(accuracy: tuple[float, ...], tokens: int) -> Script:
    """Four answers with so many tokens."""
    return profile_script(accuracy, 4, tokens, seed=0)


@cache
def plain_seconds(cluster: Cluster, tokens: int, host: SharedHost) -> float:
    """Seconds of plain decoding, in which no draft has any part."""
    return seconds(cluster, script_of(GOOD, tokens), None, host)


def speed_up(
    cluster: Cluster, accuracy: tuple[float, ...], strategy: str, host: SharedHost, tokens: int = 160
) -> float:
    """Speed-up over plain decoding on the same host, of four answers with so many tokens."""
    return plain_seconds(cluster, tokens, host) / seconds(cluster, script_of(accuracy, tokens), strategy, host)


# --------------------------------------------------------------------------------------------------------- the host


def test_stages_on_one_core_compute_at_half_their_speed_and_memory_may_slow_them_too() -> None:
    host = SharedHost(cores=1)
    assert (host.speed(1, 0.0), host.speed(2, 0.0)) == (1.0, 0.5)
    assert SharedHost(cores=2).speed(2, 0.0) == 1.0
    assert SharedHost(cores=4, streams=1.5).speed(3, 0.0) == 0.5


def test_other_processes_take_their_share_of_the_cores_while_they_are_there() -> None:
    host = SharedHost(cores=2, busy=((0.0, 0), (5.0, 1), (9.0, 3)))
    assert [host.speed(1, at) for at in (0.0, 5.0, 9.0)] == [1.0, 1.0, 0.5]
    assert [host.speed(2, at) for at in (4.9, 5.0, 9.0)] == [1.0, pytest.approx(2 / 3), pytest.approx(0.4)]
    assert (host.next_change(0.0), host.next_change(5.0)) == (5.0, 9.0)


def ends(host: SharedHost, batches: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """When the batches end, by stage; a batch is (moment at which it begins, seconds that it takes alone)."""
    clock, found = VirtualClock(), dict[int, float]()
    computing, waiting = Computing(host, clock.now), dict(batches)
    while len(found) < len(batches):
        running = [stage for stage in batches if computing.has(stage)]
        clock.wait(min([begin for begin, _ in waiting.values()] + [computing.due(stage) for stage in running]))
        for stage in running:
            if computing.end(stage):
                found[stage] = pytest.approx(clock.now())  # type: ignore[assignment]
        for stage in [stage for stage, (begin, _) in waiting.items() if begin <= clock.now()]:
            computing.begin(stage, waiting.pop(stage)[1])
    return found


def test_what_overlaps_is_slowed_alike_for_as_long_as_it_does() -> None:
    assert ends(SharedHost(cores=1), {0: (0.0, 2.0), 1: (1.0, 2.0)}) == {0: 3.0, 1: 4.0}
    assert ends(SharedHost(cores=2), {0: (0.0, 2.0), 1: (1.0, 2.0)}) == {0: 2.0, 1: 3.0}
    assert ends(SharedHost(cores=2, streams=1.5), {0: (0.0, 3.0), 1: (0.0, 3.0)}) == {0: 4.0, 1: 4.0}


def test_a_batch_feels_others_come_and_go() -> None:
    host = SharedHost(cores=1, busy=((0.0, 0), (1.0, 1), (3.0, 0)))
    assert ends(host, {0: (0.0, 3.0)}) == {0: 4.0}  # one second alone, one's worth within two, one alone


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cores": 0}, "cores"),
        ({"streams": 0.0}, "streams"),
        ({"busy": ((1.0, 2),)}, "busy"),
        ({"busy": ((0.0, 2), (5.0, 0), (4.0, 1))}, "busy"),
    ],
)
def test_what_no_host_has_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        SharedHost(**fields)  # type: ignore[arg-type]


def test_plain_decoding_is_as_fast_on_a_shared_host(two_stages: Cluster) -> None:
    script = profile_script(FAIR, 1, 20, seed=0)
    alone, shared = (seconds(two_stages, script, None, host) for host in (None, SharedHost(cores=1)))
    assert shared == pytest.approx(alone)


# ------------------------------------------------------------------------------------------------- what auto decides

CONTENDED = {
    "one core": SharedHost(cores=1),
    "memory": SharedHost(cores=2, streams=1.3),
    "other work": SharedHost(cores=2, busy=((0.0, 1),)),
}


@pytest.mark.parametrize(
    ("name", "accuracy"),
    [
        ("memory", POOR),
        *(
            pytest.param(*one, marks=pytest.mark.whole)
            for one in (("one core", WRONG), ("other work", POOR), ("other work", WRONG))
        ),
    ],
)
def test_on_contended_stages_nothing_is_lost_where_batches_that_overlap_lose(
    name: str, accuracy: tuple[float, ...], two_stages: Cluster
) -> None:
    host = CONTENDED[name]
    assert speed_up(two_stages, accuracy, "pipedec", host) < 0.9
    assert speed_up(two_stages, accuracy, "continuous", host) > 0.98
    assert speed_up(two_stages, accuracy, "auto", host) > 0.98


@pytest.mark.parametrize(
    ("accuracy", "stages"),
    [(GOOD, 2), *(pytest.param(*one, marks=pytest.mark.whole) for one in ((FAIR, 4), (POOR, 2)))],
)
def test_batches_go_one_after_another_on_stages_that_slow_each_other(
    accuracy: tuple[float, ...], stages: int, two_stages: Cluster
) -> None:
    """One memory: what it is worth then does not depend on how far stages would slow each other if they overlapped."""
    cluster = uniform_cluster(two_stages, stages)
    little, much = (
        speed_up(cluster, accuracy, "auto", SharedHost(cores=stages, streams=share * stages)) for share in (0.75, 0.4)
    )
    assert much > 0.95 * little > 1.0


@pytest.mark.parametrize("name", CONTENDED)
def test_on_contended_stages_auto_speculates_where_that_gains_all_the_same(name: str, two_stages: Cluster) -> None:
    as_told, auto = (speed_up(two_stages, GOOD, strategy, CONTENDED[name]) for strategy in ("continuous", "auto"))
    assert as_told > 1.8
    assert auto > 0.93 * as_told


# A drafter that is fair decides more narrowly; one that is good is worth its rows even on the contended stages above.
@pytest.mark.parametrize(
    "accuracy", [pytest.param(GOOD, id="good", marks=pytest.mark.whole), pytest.param(FAIR, id="fair")]
)
def test_on_stages_with_a_core_each_auto_speculates(accuracy: tuple[float, ...], two_stages: Cluster) -> None:
    host = SharedHost(cores=2)
    as_told, auto = (speed_up(two_stages, accuracy, strategy, host, 250) for strategy in ("continuous", "auto"))
    assert as_told > 1.6
    assert auto > 0.985 * as_told


@pytest.mark.parametrize(("first", "share"), [(0, 0.5), (1, 0.25)], ids=["it comes", "it goes"])
def test_load_that_changes_amid_a_request_is_noticed(first: int, share: float, two_stages: Cluster) -> None:
    """Another process on two cores: speculation that gains without it loses beside it, and plain decoding does not."""
    script = profile_script((0.4, 0.5), 1, 1600, seed=0)
    plain = seconds(two_stages, script, None)
    host = SharedHost(cores=2, busy=((0.0, first), (share * plain, 1 - first)))
    assert seconds(two_stages, script, None, host) == pytest.approx(plain)
    assert seconds(two_stages, script, "auto", host) < 0.95 * plain
