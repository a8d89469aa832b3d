"""Lost stages and drafters are replaced in time or not at all; ``python -m tests.losses 10000`` runs more histories."""

from __future__ import annotations

import logging
import random
from collections.abc import Generator, Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import CheckpointChanged, FinishReason, PenstockError, PipelineError, PipelineLost
from penstock.drafters.base import Drafter
from penstock.drafters.merged import NgramDrafter
from penstock.engine.loop import EngineLoop, Observer
from penstock.engine.recovery import FIRST_DELAY, IN_A_ROW_S, LONGEST_DELAY, MOST_LOSSES, Recovery, delay
from penstock.engine.scheduler import Scheduler
from penstock.engine.stats import Counters
from penstock.messages import Sampling
from penstock.pipeline.base import VirtualClock
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.stage.driver import StageCore, StageDriver
from penstock.strategies.base import Autoregressive
from tests.hash_model import HashLayers, plain_decode
from tests.histories import Collected
from tests.losses import Breakable, LossyHistory

TIMEOUT: Final = 100.0
PROMPT: Final = [1, 2, 3]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The log of many losses would be all that a failure shows."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(4))
def test_numbered_histories_with_losses(block: int) -> None:
    losses = 0
    for seed in range(block * 10, block * 10 + 10):
        history = LossyHistory(random.Random(seed))
        history.run()
        losses += history.losses
    assert losses > 5


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_any_history_with_losses(rng: random.Random) -> None:
    LossyHistory(rng).run()


class Stages:
    """Two stages that can be broken. ``takes`` seconds to start each time, then as many failures as are left."""

    apart: frozenset[int] = frozenset()

    def __init__(self, takes: float = 2.0, failures: int = 0, failure: Exception | None = None) -> None:
        self.failure = PipelineError("no memory") if failure is None else failure
        self.clock = VirtualClock()
        self.pool = SlotPool(60, 0)
        self.drafter: Drafter | None = None
        self.takes = takes
        self.failures = failures
        self.started: list[float] = []
        self.dropped: list[float] = []
        self.left: list[float] = []
        """Times at which stages left their pipeline, to be started elsewhere."""
        self.starting = False
        self.pipeline = self._new()
        self.loop = EngineLoop(self.pipeline, None, Scheduler(self.pool, 8, 2, 60), self.clock)
        self.loop.recovery = self.recovery = Recovery(self, self.clock, TIMEOUT)

    def _new(self) -> Breakable:
        layers = [HashLayers(stage, self.pool.total, 8) for stage in range(2)]
        cores = [StageCore(one, self.pool.total, stage == 1) for stage, one in enumerate(layers)]
        return Breakable([StageDriver(stage, core, self.clock.now) for stage, core in enumerate(cores)], self.clock)

    out_of_place = drafter_is_back = False
    may_return = False

    def drop_lost(self) -> bool:
        return self.pipeline.lost

    def drop_stages(self) -> None:
        self.out_of_place = False
        self.left.append(self.clock.now())

    def drop_all(self) -> None:
        self.dropped.append(self.clock.now())

    def start(self) -> Generator[float | None]:
        self.started.append(self.clock.now())
        until = self.clock.now() + self.takes
        self.starting = True
        try:
            while self.clock.now() < until:
                yield until
        finally:
            self.starting = False
        if self.failures:
            self.failures -= 1
            raise self.failure
        self.pipeline = self._new()

    def add(self, number: int = 0, tokens: int = 12) -> Request:
        request = Request(number, PROMPT, Sampling(seed=3), tokens, frozenset(), Autoregressive(), Collected())
        self.loop.add(request)
        return request

    def run(self) -> None:
        while self.loop.busy:
            self.loop.step()
        self.loop.audit()

    def run_broken(self) -> None:
        """Step on while every new pipeline breaks as soon as it has started."""
        while True:
            self.pipeline.broken = self.recovery.reason is None
            self.loop.step()

    def break_after(self, tokens: int) -> None:
        while self.loop.tokens < tokens:
            self.loop.step()
        self.pipeline.broken = True


def tokens_of(request: Request) -> list[int]:
    assert isinstance(request.output, Collected)
    return request.output.tokens


def expected(tokens: int = 12) -> list[int]:
    return plain_decode(PROMPT, 2, 8, 3, tokens, frozenset())


def test_requests_go_on_with_the_same_tokens() -> None:
    stages = Stages()
    requests = [stages.add(0), stages.add(1)]
    stages.break_after(5)
    stages.run()
    assert [tokens_of(request) for request in requests] == [expected()] * 2
    assert (stages.recovery.recoveries, stages.recovery.recovery_seconds) == (1, 2.0)


def test_what_comes_meanwhile_waits_and_what_leaves_meanwhile_leaves() -> None:
    stages = Stages()
    stays, leaves = stages.add(0), stages.add(1)
    stages.break_after(4)
    stages.loop.step()
    assert stages.recovery.reason == "a stage was lost: by chance"
    assert not stages.loop.scheduler.running
    comes = stages.add(2)
    stages.loop.abort(leaves)
    stages.run()
    assert [tokens_of(stays), tokens_of(comes)] == [expected()] * 2
    assert leaves.finished is FinishReason.ABORT
    assert stages.recovery.reason is None


def test_a_stage_that_cannot_start_is_tried_again_ever_later() -> None:
    stages = Stages(takes=1.0, failures=3)
    request = stages.add()
    stages.break_after(3)
    at = stages.clock.now()
    stages.run()
    assert [moment - at for moment in stages.started] == [0.0, 2.0, 5.0, 10.0]
    assert tokens_of(request) == expected()
    assert [delay(failures) for failures in (0, 1, 2, 99)] == [0.0, FIRST_DELAY, 2 * FIRST_DELAY, LONGEST_DELAY]


@pytest.mark.parametrize(("takes", "failures"), [(1.0, 1000), (1e6, 0)], ids=["fails", "hangs"])
def test_a_recovery_that_takes_too_long_ends_with_the_loss(takes: float, failures: int) -> None:
    stages = Stages(takes, failures)
    request = stages.add()
    stages.break_after(3)
    at = stages.clock.now()
    with pytest.raises(PipelineError, match=r"a stage was lost: by chance; no recovery within 100 s"):
        stages.run()
    assert request.finished is FinishReason.ERROR
    assert tokens_of(request) == expected()[:3]
    assert stages.clock.now() - at <= TIMEOUT
    assert not stages.starting
    with pytest.raises(PipelineError, match="takes no more requests"):
        stages.add(1)


@pytest.mark.parametrize("failure", [KeyError("a host"), OSError(2, "no such file"), RuntimeError("a fault of ours")])
def test_whatever_fails_while_stages_start_is_tried_again(failure: Exception) -> None:
    stages = Stages(takes=1.0, failures=2, failure=failure)
    request = stages.add()
    stages.break_after(3)
    stages.run()
    assert len(stages.started) == 3
    assert tokens_of(request) == expected()


def test_a_checkpoint_that_has_changed_is_given_up_at_once() -> None:
    stages = Stages(takes=1.0, failures=1000, failure=CheckpointChanged("model: w has changed"))
    request = stages.add()
    stages.break_after(3)
    with pytest.raises(PipelineError, match="a stage was lost: by chance; model: w has changed"):
        stages.run()
    assert len(stages.started) == 1
    assert request.finished is FinishReason.ERROR


@pytest.mark.parametrize("failure", [KeyError("its address"), PipelineError("it is gone again")])
def test_a_loss_amid_a_move_is_a_loss_like_any_other(failure: Exception) -> None:
    """The host that stages move to is gone again: they start where they can, and nothing is given up."""
    stages = Stages(failures=2, failure=failure)
    stages.out_of_place = True
    request = stages.add(0)
    stages.run()
    assert tokens_of(request) == expected()
    assert len(stages.started) == 3
    assert stages.recovery.given_up is None


def test_where_hosts_may_return_requests_end_with_the_loss_and_the_engine_does_not() -> None:
    stages = Stages(failures=20)
    stages.may_return = stages.recovery.keeps_trying = True
    runs, waits = stages.add(0), stages.add(1)
    stages.break_after(3)
    while stages.recovery.given_up is None:
        stages.loop.step()
    assert (runs.finished, waits.finished) == (FinishReason.ERROR, FinishReason.ERROR)
    assert (runs.error, waits.error) == ("", "")
    with pytest.raises(PipelineError, match=r"no request is taken until hosts are back: .* no recovery within 100 s"):
        stages.add(2)
    while stages.recovery.given_up is not None:
        stages.loop.step()
    request = stages.add(3)
    stages.run()
    assert tokens_of(request) == expected()


def test_stages_move_once_nothing_runs() -> None:
    stages = Stages()
    request = stages.add(0)
    stages.out_of_place = True
    stages.loop.step()
    assert stages.recovery.reason == "stages move to hosts that are back", "what waits has not begun"
    while stages.recovery.reason is not None:
        stages.loop.step()
    stages.out_of_place = True
    while request.finished is None:
        stages.loop.step()
    assert len(stages.started) == 1
    stages.loop.step()
    assert stages.recovery.reason is not None
    while stages.recovery.reason is not None:
        stages.loop.step()
    assert len(stages.started) == len(stages.left) == 2
    assert tokens_of(request) == expected()
    assert stages.recovery.recoveries == 0


def test_stages_move_amid_a_request_where_somebody_asks_for_it() -> None:
    stages = Stages()
    request = stages.add(0)
    for _ in range(5):
        stages.loop.step()
    assert not stages.loop.rebalance(), "they are where they belong"
    stages.out_of_place = True
    stages.loop.step()
    assert not stages.started, "a request runs"
    assert stages.loop.rebalance()
    stages.loop.step()
    assert stages.recovery.reason == "stages move to hosts that are back"
    assert request.finished is None
    stages.run()
    assert len(stages.started) == 1
    assert tokens_of(request) == expected()
    assert stages.recovery.recoveries == 0


def test_stages_stay_where_they_are_amid_a_request_if_nobody_asks() -> None:
    stages = Stages()
    request = stages.add(0)
    stages.loop.step()
    stages.out_of_place = True
    while request.finished is None:
        assert stages.recovery.reason is None
        stages.loop.step()
    assert not stages.started
    assert tokens_of(request) == expected()


class Returning(Stages):
    """A drafter that is back after a while, and starts beside the stages."""

    def start(self) -> Generator[float | None]:
        yield self.clock.now() + self.takes
        self.drafter, self.drafter_is_back = NgramDrafter(3, 1), False
        self.started.append(self.clock.now())


def test_a_drafter_that_is_back_drafts_amid_answers() -> None:
    stages = Returning()
    request = stages.add(0)
    while not tokens_of(request):
        stages.loop.step()
    stages.drafter_is_back = True
    stages.run()
    assert tokens_of(request) == expected()
    assert len(stages.started) == 1
    assert stages.loop.drafter is stages.drafter
    assert stages.recovery.recoveries == 0


class Unplaced(Stages):
    """Stages for which it cannot be told where they could be."""

    asked = 0

    @property
    def out_of_place(self) -> bool:
        self.asked += 1
        raise KeyError("10.0.0.7:7700")

    @out_of_place.setter
    def out_of_place(self, value: bool) -> None: ...


def test_stages_stay_where_they_are_if_it_cannot_be_told_where_they_could_be() -> None:
    stages = Unplaced()
    request = stages.add(0)
    for _ in range(5):
        stages.loop.step()
    with pytest.raises(KeyError, match="7700"):
        stages.loop.rebalance()
    stages.run()
    asked = stages.asked
    assert stages.recovery.advance(stages.loop), "nothing runs: stages may move, or go on"
    assert stages.asked > asked
    assert tokens_of(request) == expected()
    assert not stages.started


def test_nobody_moves_stages_that_are_being_replaced() -> None:
    stages = Stages()
    request = stages.add(0)
    stages.break_after(3)
    stages.loop.step()
    stages.out_of_place = True
    while stages.recovery.reason is not None:
        assert not stages.loop.rebalance()
        stages.loop.step()
    assert stages.loop.rebalance()
    stages.loop.step()
    assert stages.recovery.reason == "stages move to hosts that are back"
    stages.run()
    assert tokens_of(request) == expected()


def test_without_a_timeout_every_loss_is_an_error() -> None:
    stages = Stages()
    stages.loop.recovery = Recovery(stages, stages.clock, 0.0)
    stages.add()
    stages.break_after(3)
    with pytest.raises(PipelineLost, match="by chance"):
        stages.run()
    assert not stages.started


def test_an_engine_that_ends_starts_nothing_any_more() -> None:
    stages = Stages()
    stages.add()
    stages.break_after(3)
    stages.loop.step()
    stages.loop.step()
    assert stages.starting
    stages.loop.end()
    assert not stages.starting


class Fatal(Observer):
    """Breaks a stage whenever a request's rows enter."""

    def __init__(self, stages: Stages, number: int) -> None:
        self.stages, self.number = stages, number

    def submitted(self, batch: Any, at: float) -> None:
        if self.number in batch.rows.requests:
            self.stages.pipeline.broken = True


def test_a_request_that_kills_its_stages_ends_and_the_others_go_on() -> None:
    stages = Stages()
    other = stages.add(0)
    stages.break_after(1)
    fatal = stages.add(1)
    stages.loop.observers.append(Fatal(stages, 1))
    stages.run()
    assert fatal.finished is FinishReason.ERROR
    assert fatal.error == f"{MOST_LOSSES} times in a row a stage was lost before its next token: " + str(
        PipelineLost("a stage was lost: by chance")
    )
    assert tokens_of(other) == expected()


def test_stages_that_are_lost_without_any_request_end_the_engine_at_last() -> None:
    stages = Stages()
    with pytest.raises(PipelineError, match=f"{MOST_LOSSES} losses in a row without a token"):
        stages.run_broken()
    assert len(stages.started) == MOST_LOSSES - 1


def test_losses_that_are_far_apart_are_not_in_a_row() -> None:
    stages = Stages()
    for recovered in range(1, 2 * MOST_LOSSES):
        stages.pipeline.broken = True
        while stages.recovery.recoveries < recovered:
            stages.loop.step()
        stages.clock.wait(stages.clock.now() + 2 * IN_A_ROW_S)


def test_counters_say_what_is_lost_and_how_long_requests_waited() -> None:
    stages = Stages()
    counters = Counters(stages.loop)
    stages.loop.observers.append(counters)
    stages.add()
    stages.break_after(3)
    stages.loop.step()
    now = counters.stats()
    assert (now.recovering, now.batches_in_flight, now.running, now.waiting) == ("a stage was lost: by chance", 0, 0, 1)
    stages.run()
    then = counters.stats()
    assert (then.recovering, then.recoveries, then.recovery_seconds, then.drafter_losses) == (None, 1, 2.0, 0)
    assert then.preemptions == 1


def test_a_lost_drafter_is_replaced_while_requests_go_on() -> None:
    class LostDrafter(NgramDrafter):
        def poll(self) -> Any:
            raise PipelineLost("the drafter was lost")

    stages = Stages()
    request = stages.add()
    stages.break_after(0)
    stages.pipeline.broken = False
    stages.drafter, stages.loop.drafter = NgramDrafter(3, 1), LostDrafter(3, 1)
    stages.run()
    assert tokens_of(request) == expected()
    assert (stages.recovery.drafter_losses, stages.recovery.recoveries) == (1, 0)


IDLE: Final = 30.0


def rested(takes: float = 2.0, failures: int = 0) -> Stages:
    """Stages that rest after a request."""
    stages = Stages(takes, failures)
    stages.loop.idle_timeout = IDLE
    stages.add(0)
    stages.run()
    at = stages.clock.now()
    stages.loop.step()
    assert stages.recovery.resting
    assert stages.dropped == [at + IDLE]
    return stages


def test_an_idle_engine_rests_and_the_next_request_has_the_same_tokens() -> None:
    stages = rested()
    with pytest.raises(PenstockError, match="nothing is due"):  # it waits for nothing but a request
        stages.loop.step()
    at = stages.clock.now()
    requests = [stages.add(1), stages.add(2)]
    stages.loop.step()
    assert not stages.recovery.resting
    assert stages.recovery.reason == "the weights are loaded again after a rest"
    stages.run()
    assert [tokens_of(request) for request in requests] == [expected()] * 2
    assert stages.started == [at]
    assert (stages.recovery.reason, stages.recovery.recoveries) == (None, 0)
    stages.loop.step()
    assert len(stages.dropped) == 2


def test_a_request_that_leaves_while_it_waits_for_the_weights_leaves() -> None:
    stages = rested()
    leaves = stages.add(1)
    stages.loop.step()
    stages.loop.abort(leaves)
    stages.run()
    assert leaves.finished is FinishReason.ABORT
    while stages.recovery.reason is not None:
        stages.loop.step()
    stages.loop.step()
    assert stages.recovery.resting


def test_weights_that_cannot_be_loaded_again_count_as_lost() -> None:
    stages = rested(failures=2)
    request = stages.add(1)
    stages.run()
    assert tokens_of(request) == expected()
    assert len(stages.started) == 3
    stages = rested(failures=1000)
    stages.add(1)
    with pytest.raises(PipelineError, match="loaded again after a rest; no recovery within 100 s: no memory"):
        stages.run()


def test_nothing_rests_without_recovery_or_while_something_is_lost() -> None:
    stages = Stages(takes=1000.0)
    stages.recovery._timeout = 2000.0
    stages.loop.idle_timeout = IDLE
    leaves = stages.add(0)
    stages.break_after(3)
    stages.loop.step()
    stages.loop.abort(leaves)
    while stages.recovery.reason is not None:
        stages.loop.step()
    assert stages.clock.now() >= 1000
    assert stages.dropped == []
    never = Stages()
    never.loop.recovery = Recovery(never, never.clock, 0.0)
    never.loop.idle_timeout = IDLE
    with pytest.raises(PenstockError, match="nothing is due"):  # noqa: PT012
        while not never.dropped:
            never.loop.step()


@settings(max_examples=60)
@given(st.lists(st.floats(0, 3 * IDLE), max_size=8), st.floats(0, 2 * IDLE), st.randoms(use_true_random=False))
def test_requests_at_any_moment_have_their_tokens(gaps: list[float], takes: float, rng: random.Random) -> None:
    stages = Stages(takes)
    stages.loop.idle_timeout = IDLE
    requests = []
    for number, gap in enumerate(gaps):
        until = stages.clock.now() + gap
        while stages.clock.now() < until and not stages.recovery.resting:
            stages.loop.step()
        requests.append(stages.add(number, rng.randrange(1, 12)))
        if rng.random() < 0.5:
            stages.run()
        if rng.random() < 0.2 and requests[-1].finished is None:
            stages.loop.abort(requests[-1])
    stages.run()
    for request in requests:
        assert tokens_of(request) == expected()[: len(tokens_of(request))]
        assert request.finished in (FinishReason.LENGTH, FinishReason.ABORT)
        assert request.finished is FinishReason.ABORT or len(tokens_of(request)) == request.max_tokens
