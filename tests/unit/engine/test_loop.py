"""The loop between strategies and drafter: what it tells the one of the other, and what it accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from penstock.cluster.timing import DeviceTiming, LinkTiming, StageTiming
from penstock.core import FinishReason, PenstockError
from penstock.drafters.base import Draft, DraftRequest, InstantDrafter
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.engine.loop import EngineLoop, Observer
from penstock.engine.scheduler import InFlight, Schedule, Scheduler
from penstock.estimates.estimates import Estimates
from penstock.messages import Batch, Cancel, SampledToken, Sampling
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.stage.driver import StageCore, StageDriver
from penstock.strategies.auto import Continuous
from penstock.strategies.base import Autoregressive, Context, Strategy
from penstock.strategies.pipedec import PipeDec
from penstock.tree import Node
from tests.hash_model import HashLayers
from tests.histories import Collected


class Rowless(InstantDrafter):
    """A drafter whose answers are empty and take no row."""

    asked = 0

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        self.asked += 1
        self._answers += [Draft(node, []) for ask in asks for node in ask.nodes]
        return 0


def test_a_drafter_that_is_not_busy_is_not_due() -> None:
    """It is not due after an answer without a row either: a strategy would wait for an answer that never comes."""
    clock, pool, drafter = VirtualClock(), SlotPool(40, 20), Rowless()
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([StageDriver(0, core, clock.now)], clock)
    loop = EngineLoop(pipeline, drafter, Scheduler(pool, 8, 1, 40), clock)
    loop.add(Request(0, [1, 2, 3], Sampling(), 10, frozenset(), PipeDec(3, 2, 2), Collected()))
    while loop.busy:
        loop.step()
        assert drafter.busy == (loop.draft_due < math.inf)
    assert drafter.asked > 1


def test_estimates_are_changed_while_idle_only_and_left_as_they_were() -> None:
    clock, pool, drafter = VirtualClock(), SlotPool(40, 20), Rowless()
    second = StageEmulation(timing=StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),)))
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([emulated_driver(0, core, clock.now, second)], clock)
    loop = EngineLoop(pipeline, drafter, Scheduler(pool, 8, 1, 40), clock)
    first, other = loop.estimates, Estimates()
    loop.add(Request(0, [1, 2, 3], Sampling(), 10, frozenset(), PipeDec(3, 2, 2), Collected()))
    loop.step()
    with pytest.raises(PenstockError, match="only while idle"):
        loop.use_estimates(other)
    while loop.busy:
        loop.step()
    loop.drain()
    learned = first.drafts.miss_rate
    assert learned > 0.5
    loop.use_estimates(other)
    assert other.pipeline.step_s(1) == loop.pace.until == 0.0, "nothing is known, so nothing is held"
    loop.add(Request(1, [1, 2, 3], Sampling(), 5, frozenset(), PipeDec(3, 2, 2), Collected()))
    while loop.busy:
        loop.step()
    assert other.pipeline.step_s(1) == 1.0
    assert first.drafts.miss_rate == learned


class Counting(Scheduler):
    """Counts how often it is asked what enters next."""

    asked = 0

    def schedule(self, context: Context, batches: int, held: bool = False) -> Schedule:
        self.asked += 1
        return super().schedule(context, batches, held)


def test_plain_decoding_is_left_alone_between_its_results() -> None:
    """Nothing enters on other events, such as a stage's taking the batch or the moment at which the next is due."""
    clock, pool = VirtualClock(), SlotPool(40, 20)
    second = StageEmulation(timing=StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),)))
    cores = [StageCore(HashLayers(i, pool.total, 4), pool.total, is_last=i == 1) for i in range(2)]
    pipeline = InProcessPipeline([emulated_driver(i, core, clock.now, second) for i, core in enumerate(cores)], clock)
    scheduler = Counting(pool, 8, 1, 40)
    loop = EngineLoop(pipeline, None, scheduler, clock)
    loop.add(Request(0, [1, 2, 3], Sampling(), 20, frozenset(), Autoregressive(), Collected()))
    while loop.busy:
        loop.step()
    assert scheduler.asked <= loop.tokens + 1, "once for the prompt and once for each token"


class AfterEntering(InstantDrafter):
    """A drafter that can answer for a node only once it has entered, like a head on the first stage's output."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = 0

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for node in (node for ask in asks for node in ask.nodes):
            self.answered += node.entered
            self._answers.append(Draft(node, [(0, -0.1)] if node.entered else None))
        return 1


def test_what_is_asked_about_before_it_enters_is_asked_about_again_once_it_has() -> None:
    """The question comes again at once, not under the next root, which with three stages is three steps away."""
    clock, pool, drafter = VirtualClock(), SlotPool(40, 20), AfterEntering()
    second = StageEmulation(timing=StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),)))
    cores = [StageCore(HashLayers(i, pool.total, 4), pool.total, is_last=i == 2) for i in range(3)]
    pipeline = InProcessPipeline([emulated_driver(i, core, clock.now, second) for i, core in enumerate(cores)], clock)
    loop = EngineLoop(pipeline, drafter, Scheduler(pool, 8, 1, 40), clock)
    loop.add(Request(0, [1, 2, 3], Sampling(), 10, frozenset(), PipeDec(3, 1, 1), Collected()))
    while not drafter.answered:
        loop.step()
    assert clock.now() < 3.0, "before the first result, which is the first change of the root"


FIRST, SECOND = [(0, -0.5), (1, -1.0)], [(2, -0.5), (3, -1.0)]


class Repeating(InstantDrafter):
    """A drafter that answers again for every node, whether it may or not."""

    def __init__(self, again: list[tuple[int, float]] | None) -> None:
        super().__init__()
        self.again = again
        self.answered: list[Node] = []
        self.corrects: set[bool] = set()

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        self._answers += [Draft(node, self.again) for node in self.answered]
        for ask in asks:
            self.corrects.add(ask.corrects)
            self.answered += ask.nodes
            self._answers += [Draft(node, FIRST) for node in ask.nodes]
        return len(self._answers)


def drafted_again(drafter: Repeating, make: Callable[[], Strategy]) -> EngineLoop:
    """Run one request to its end, drafted for by ``drafter``."""
    clock, pool = VirtualClock(), SlotPool(60, 40)
    second = StageEmulation(timing=StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),)))
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([emulated_driver(0, core, clock.now, second)], clock)
    loop = EngineLoop(pipeline, drafter, Scheduler(pool, 8, 1, 60), clock)
    loop.add(Request(0, [1, 2, 3], Sampling(), 20, frozenset(), make(), Collected()))
    while loop.busy:
        loop.step()
    return loop


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: Continuous(2, 2), True),
        (lambda: Continuous(2, 2, in_flight_correction=False), False),
        (lambda: PipeDec(3, 2, 2), False),
    ],
)
def test_corrections_reach_the_strategies_that_want_them_and_no_other(
    make: Callable[[], Strategy], wanted: bool
) -> None:
    drafter = Repeating(SECOND)
    loop = drafted_again(drafter, make)
    assert drafter.corrects == {wanted}
    assert any(node.candidates == SECOND and node.earlier[0] == FIRST for node in drafter.answered) is wanted
    assert any(node.earlier for node in drafter.answered) is wanted
    assert (loop.estimates.drafts.corrections.decisions > 0) is wanted
    assert loop.estimates.drafts.first_answers.decisions > 0


@pytest.mark.parametrize("again", [None, []])
def test_an_answer_stands_where_the_drafter_comes_back_with_nothing(again: list[tuple[int, float]] | None) -> None:
    drafter = Repeating(again)
    drafted_again(drafter, lambda: Continuous(2, 2))
    assert len(drafter.answered) > 20
    assert all(node.candidates == FIRST and not node.earlier for node in drafter.answered)


def test_the_loop_forgets_whom_it_has_asked_about() -> None:
    assert not drafted_again(Repeating(SECOND), lambda: Continuous(2, 2))._asked


def run(loop: EngineLoop) -> None:
    while loop.busy:
        loop.step()


class Broken(Collected):
    """An output that fails, and fails again when it is told of its end."""

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        raise ValueError("no such character")

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        raise ValueError("no such character")


class Ends(Observer):
    """An observer that notes which requests have ended, and fails at the first."""

    def __init__(self) -> None:
        self.reasons: dict[int, FinishReason] = {}

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        self.reasons[request.number] = reason
        if len(self.reasons) == 1:
            raise ValueError("no such request")


def test_whatever_ends_the_loop_every_request_has_its_reply() -> None:
    clock, pool, ends = VirtualClock(), SlotPool(90, 0), Ends()
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([StageDriver(0, core, clock.now)], clock)
    loop = EngineLoop(pipeline, None, Scheduler(pool, 8, 2, 40), clock, [ends])
    outputs = [Broken(), Collected(), Collected()]
    for number, output in enumerate(outputs):
        loop.add(Request(number, [1, 2, 3], Sampling(), 10, frozenset(), Autoregressive(), output))
    with pytest.raises(ValueError, match="no such character"):
        run(loop)
    assert [output.reasons for output in outputs[1:]] == [[FinishReason.ERROR]] * 2
    assert ends.reasons == dict.fromkeys(range(3), FinishReason.ERROR)
    assert not loop.scheduler.running
    assert not loop.scheduler.waiting
    assert loop.ended == "ValueError: no such character"


def test_an_observer_that_fails_at_a_requests_end_does_not_keep_its_reply() -> None:
    clock, pool = VirtualClock(), SlotPool(90, 0)
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([StageDriver(0, core, clock.now)], clock)
    loop, output = EngineLoop(pipeline, None, Scheduler(pool, 8, 2, 40), clock, [Ends()]), Collected()
    loop.add(Request(0, [1, 2, 3], Sampling(), 10, frozenset(), Autoregressive(), output))
    with pytest.raises(ValueError, match="no such request"):
        run(loop)
    assert output.reasons == [FinishReason.LENGTH]


def test_a_request_that_comes_between_two_steps_enters_at_once() -> None:
    """It does not wait for the next result: the first stage is free."""
    clock, pool = VirtualClock(), SlotPool(80, 20)
    timings = [StageTiming(devices=(DeviceTiming(seconds, 0.0, 0.0),)) for seconds in (1.0, 100.0)]
    cores = [StageCore(HashLayers(stage, pool.total, 4), pool.total, is_last=stage == 1) for stage in range(2)]
    times = [StageEmulation(timing=timing) for timing in timings]
    drivers = [emulated_driver(i, core, clock.now, times[i]) for i, core in enumerate(cores)]
    loop = EngineLoop(InProcessPipeline(drivers, clock), None, Scheduler(pool, 8, 2, 40), clock)
    first, second = (
        Request(number, [1, 2, 3], Sampling(), 2, frozenset(), Autoregressive(), Collected()) for number in range(2)
    )
    loop.add(first)
    while clock.now() < 1.0:
        loop.step()
    loop.add(second)
    loop.step()
    assert second.committed
    assert clock.now() < 100.0


class Ordered(Observer):
    """Writes down the order in which a drafter is asked, batches are sent and readers served."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def waits(self) -> None:
        self.done.append("|")

    def submitted(self, batch: Batch, at: float) -> None:
        self.done.append("send")


def test_what_follows_a_miss_leaves_first() -> None:
    """It leaves before the drafter is asked, unless the strategy would wait for the drafter; readers come last."""
    order = Ordered()

    class Drafts(Rowless):
        def ask(self, asks: Sequence[DraftRequest]) -> int:
            order.done.append("ask")
            return super().ask(asks)

    class Reads(Collected):
        def detokenize_pending(self) -> None:
            order.done.append("read")

    clock, pool = VirtualClock(), SlotPool(40, 20)
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    second = StageEmulation(timing=StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),)))
    pipeline = InProcessPipeline([emulated_driver(0, core, clock.now, second)], clock)
    loop = EngineLoop(pipeline, Drafts(), Scheduler(pool, 8, 1, 40), clock, [order])
    loop.add(Request(0, [1, 2, 3], Sampling(), 10, frozenset(), PipeDec(3, 1, 1), Reads()))
    run(loop)
    steps = [step.strip() for step in " ".join(order.done).split("|")]
    misses = [step for step in steps if "send" in step and "read" in step]
    assert len(misses) >= 8
    assert set(misses) == {"send ask read"}


class CreepingClock(VirtualClock):
    """A clock that moves on at every look, as if the engine's own work took time."""

    def now(self) -> float:
        self._now += 1e-3
        return self._now


class Watchful(EngineLoop):
    """Checks before every wait that nothing has become free since rows were last composed."""

    free_then: tuple[bool, ...] = (False, False, False)
    missed = 0

    def _submit(self) -> None:
        self.free_then = self._free
        super()._submit()

    def _due(self) -> float | None:
        due = super()._due()
        became_free = any(now and not then for then, now in zip(self.free_then, self._free, strict=True))
        self.missed += became_free and (due is None or due > self.clock.now())
        return due


class Paced(PipeDec):
    rate_limited = True


@pytest.mark.parametrize("latency", [0.0, 0.01, 0.03])
def test_what_becomes_free_while_the_engine_decides_is_made_use_of(latency: float) -> None:
    """The first stage's buffer, or the moment until which a batch is held: nothing else would wake the engine."""
    clock, pool = CreepingClock(), SlotPool(160, 40)
    timing, link = StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),)), LinkTiming(latency, 1e12, 0.0)
    stage = StageEmulation(timing=timing, up=link, down=link)
    cores = [StageCore(HashLayers(i, pool.total, 4), pool.total, is_last=i == 2) for i in range(3)]
    drivers = [emulated_driver(i, core, clock.now, stage) for i, core in enumerate(cores)]
    loop = Watchful(InProcessPipeline(drivers, clock), Repeating(None), Scheduler(pool, 8, 1, 160), clock)
    loop.add(Request(0, [1, 2, 3], Sampling(), 100, frozenset(), Paced(100, 1, 1), Collected()))
    run(loop)
    assert loop.missed == 0


class Stopping(Collected):
    """An output whose text holds a stop string after ``length`` tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        super().append(pick, at)
        return FinishReason.STOP if len(self.tokens) == self.length else None


@pytest.mark.parametrize(
    ("length", "reason"), [(2, FinishReason.STOP), (3, FinishReason.STOP), (4, FinishReason.LENGTH)]
)
def test_a_stop_string_at_the_last_token_allowed_is_a_stop(length: int, reason: FinishReason) -> None:
    clock, pool = VirtualClock(), SlotPool(40, 20)
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([StageDriver(0, core, clock.now)], clock)
    loop = EngineLoop(pipeline, None, Scheduler(pool, 8, 1, 40), clock)
    output = Stopping(length)
    loop.add(Request(0, [1, 2, 3], Sampling(), 3, frozenset(), Autoregressive(), output))
    while loop.busy:
        loop.step()
    assert output.reasons == [reason]


class Compared(Collected):
    """An output that keeps what a token of it would have taken in plain decoding."""

    plain_s: float | None = None

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        super().finish(reason, at, plain_s)
        self.plain_s = plain_s


@pytest.mark.parametrize(
    ("make", "together", "known"),
    [(lambda: PipeDec(3, 2, 2), 1, 0.5), (Autoregressive, 1, 0.0), (lambda: PipeDec(3, 2, 2), 2, 0.0)],
)
def test_a_gain_is_known_of_what_drafts_and_runs_alone(
    make: Callable[[], Strategy], together: int, known: float
) -> None:
    clock, pool = VirtualClock(), SlotPool(80, 20)
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([StageDriver(0, core, clock.now)], clock)
    loop = EngineLoop(pipeline, Rowless(), Scheduler(pool, 8, 2, 40), clock, estimates=Estimates(modelled_plain_s=0.5))
    outputs = [Compared() for _ in range(together)]
    for number, output in enumerate(outputs):
        loop.add(Request(number, [1, 2, 3], Sampling(), 10, frozenset(), make(), output))
    run(loop)
    assert [output.plain_s for output in outputs] == [known] * together


def test_a_cancel_is_forgotten_behind_the_last_batch_that_it_names() -> None:
    flight, early, late = InFlight(), Node(1, 5, 0, 0), Node(2, 6, 1, 1)
    flight.entered(7, [early])
    flight.entered(9, [late])
    assert flight.cancel([early, late]) == Cancel(before=10, nodes=[1, 2])
    assert flight.cancel([Node(3, 7, 2, 2)]) is None
