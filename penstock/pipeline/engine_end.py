"""The engine's end of a pipeline, and a stage put together from its plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.emulation.device import link_of
from penstock.emulation.stage import emulated_driver
from penstock.messages import MOST, Batch, Cancel, GrammarPrepared, Message, Ready, Result, digest_of
from penstock.pipeline.base import Clock, StagePlan, TapSpec
from penstock.stage.driver import REAL_LINK, Accelerator, Core, Device, Link, Outgoing, StageCore, StageDriver
from penstock.stage.linked import Leader
from penstock.stage.visibility import ProtocolError

# ----------------------------------------------------------------------------------------------------------- engine end
# The engine's end of a pipeline: when a batch may leave, and which results are accepted.


class EngineEnd:
    """The state of the first stage's buffer, the link into it, and the results under way.

    Every batch that leaves is remembered until its result comes. Results have to arrive in stream order, answer
    all rows that were asked about (but cancelled ones, and a drafter's) and no others, and name known tokens: below
    ``vocab_size``.
    """

    def __init__(self, clock: Clock, link: Link, vocab_size: int = MOST) -> None:
        self.listener: Callable[[Message], bool] | None = None
        self.unprepared: set[int] = set()
        """Requests whose grammars the last stage has not compiled yet."""
        self._clock = clock
        self._link = link
        self._vocab_size = vocab_size
        self._free_at: float | None = 0.0
        """Time from which on the first stage's buffer is free; None from a batch's leaving to the stage's Ready."""
        self._results: deque[tuple[Result, float]] = deque()
        """(result, the moment at which it arrives), in stream order."""
        self._awaited: deque[Batch] = deque()
        """The batches in flight, in stream order."""
        self._cancelled: dict[int, int] = {}
        """Node that stages may leave unanswered -> the stream number before which they may."""
        self._submitted = range(0)
        """The numbers of all batches that have left."""

    @property
    def ready(self) -> bool:
        return self._free_at is not None and self._free_at <= self._clock.now()

    def sending(self, message: Batch | Cancel) -> float:
        """Note that a message leaves now. Returns when it arrives; 0 if that is when it is received."""
        if isinstance(message, Batch):
            # The buffer is taken until the first stage says Ready.
            self._free_at = None
            self._awaited.append(message)
            self._submitted = range(self._submitted.start if self._submitted else message.stream, message.stream + 1)
        else:
            # Stages may leave these nodes unanswered in batches before ``before``, and in no later one.
            self._cancelled.update(dict.fromkeys(message.nodes, message.before))
        return self._link.arrival(self._clock.now(), self._link.sending(message))

    def received(self, message: Message, arrives: float) -> bool:
        """Take in a message from a stage. Returns whether it was expected.

        Raises ProtocolError for a result that answers no batch in flight, or names a token beyond the vocabulary.
        """
        if isinstance(message, Ready) and message.stage == 0:
            self._free_at = arrives
        elif isinstance(message, GrammarPrepared):
            self.unprepared.discard(message.request)
        elif isinstance(message, Result):
            self._check(message)
            self._results.append((message, arrives))
        else:
            return self.listener is not None and self.listener(message)
        return True

    def _check(self, result: Result) -> None:
        # The stage may run on another host, which could send anything: only what was asked for is accepted.
        due = self._awaited[0] if self._awaited else None
        stream = None if due is None else due.stream
        wanted = set() if due is None else {due.rows.nodes[row] for row in due.wanted}
        if result.stream != stream:
            raise ProtocolError(f"result {result.stream} arrived where {stream} was due")
        first = [answer for answer in result.candidates if answer.level == 0]
        answered = [pick.node for pick in result.picks] + [answer.node for answer in first]
        if len(set(answered)) < len(answered) or not wanted.issuperset(answered):
            raise ProtocolError(f"result {stream} speaks of nodes that it was not asked about")
        if (token := highest_token(result)) >= self._vocab_size:
            raise ProtocolError(f"result {stream} names token {token}; the model's are 0 to {self._vocab_size - 1}")
        if due is not None:
            check_levels(due, result)
            self._check_answers(due, wanted.difference(answered), result)
        self._awaited.popleft()

    def _check_answers(self, due: Batch, unanswered: set[int], result: Result) -> None:
        """Raise ProtocolError where a row's question is not answered: its request would wait without end."""
        missing = sorted(node for node in unanswered if self._cancelled.get(node, 0) <= due.stream)
        if missing and not due.candidates:  # no token depends on what a drafter leaves out
            raise ProtocolError(f"result {due.stream} does not speak of nodes {missing}")
        if result.picks if due.candidates else result.candidates:
            raise ProtocolError(f"result {due.stream} answers another question than was asked")
        if self._cancelled:
            self._cancelled = {node: before for node, before in self._cancelled.items() if before > due.stream + 1}

    def submitted(self, stream: int) -> str | None:
        """The digest of a batch in flight; "" for a number that no batch has had, None for a batch that is out."""
        if stream not in self._submitted:
            return ""
        return next((digest_of(batch) for batch in self._awaited if batch.stream == stream), None)

    def arrived(self) -> list[Result]:
        """Results that have arrived by now, in stream order."""
        now, arrived = self._clock.now(), []
        while self._results and self._results[0][1] <= now:
            arrived.append(self._results.popleft()[0])
        return arrived

    @property
    def due(self) -> float | None:
        """Time at which the buffer is free or the next result arrives; None while neither is known."""
        free = self._free_at if self._free_at is not None and self._free_at > self._clock.now() else None
        if not self._results:
            return free
        arrives = self._results[0][1]
        return arrives if free is None else min(arrives, free)


def check_levels(due: Batch, result: Result) -> None:
    """Raise ProtocolError unless each node's answers are of levels 0, 1, ..., as many as were asked for."""
    next_level: dict[int, int] = {}
    for answer in result.candidates:
        if not answer.level == next_level.get(answer.node, 0) <= due.ahead:
            raise ProtocolError(
                f"result {result.stream} answers level {answer.level} of node {answer.node} out of turn"
            )
        next_level[answer.node] = answer.level + 1


def highest_token(result: Result) -> int:
    """The highest token that a result names; -1 if it names none."""
    picks = max(
        (max(pick.token, *(token for token, _ in pick.top)) if pick.top else pick.token for pick in result.picks),
        default=-1,
    )
    return max((max(answer.tokens, default=-1) for answer in result.candidates), default=picks)


# ------------------------------------------------------------------------------------------------------------- assembly
# From a stage's plan to its parts: layers, core and driver.


def load_layers(plan: StagePlan, on_read: Callable[[int, int], None] | None = None, rank: int = 0) -> Any:
    """Load a rank's share of the stage's layers, or the learned drafter's module.

    ``on_read`` is called with how many numbers have been read, and how many there are.
    """
    from penstock.models.shares import Ranks
    from penstock.models.stage_model import load_stage

    if plan.target:
        from penstock.models.speculators.open import load_speculator_stage

        return load_speculator_stage(
            plan.model,
            plan.target,
            capacity=plan.capacity,
            dtype=plan.dtype,
            device=plan.device,
            quantization=plan.quantization,
        )
    return load_stage(
        plan.model,
        plan.first,
        plan.last,
        capacity=plan.capacity,
        dtype=plan.dtype,
        device=plan.device,
        quantization=plan.quantization,
        max_model_len=plan.max_model_len,
        tokenizer=plan.tokenizer,
        numerics=plan.numerics,
        gives_back=plan.gives_back,
        on_read=on_read,
        ranks=Ranks(rank, plan.ranks),
    )


def compute_with(threads: int) -> None:
    """Have torch use this number of threads in this process from now on."""
    import torch

    torch.set_num_threads(threads)


def make_core(plan: StagePlan, index: int, stages: int, layers: Any, leader: Leader | None = None) -> StageCore:
    """The core of stage ``index`` of ``stages``, which computes with ``layers`` from ``load_layers``.

    ``leader`` has the stage's other ranks compute their shares.
    """
    taps = plan.tap.layers if plan.tap is not None else ()
    if taps:
        layers.tap(taps)
    if not plan.target:
        layers.prepare()
    core = StageCore(layers, plan.capacity, is_last=index == stages - 1, taps=taps, vocab_size=plan.vocab_size)
    core.leader = leader
    if plan.target:
        core.reader = layers
    return core


def make_driver(plan: StagePlan, index: int, core: Core, clock: Callable[[], float]) -> StageDriver:
    """The driver of stage ``index``, on the real device that the plan names or on a modelled one."""
    if plan.emulation is None:
        return StageDriver(index, core, clock, real_device(plan.device, clock))
    return emulated_driver(index, core, clock, plan.emulation)


def real_device(device: str, clock: Callable[[], float]) -> Device:
    """Keeps the time of a stage whose device, by torch's name, is not modelled."""
    if device == "cpu":
        return Device(clock)
    from penstock.models.packing import finish

    return Accelerator(clock, partial(finish, device))


def entrance(plan: StagePlan) -> Link:
    """The engine's link to the first stage."""
    return link_of(plan.emulation.up if plan.emulation is not None else None)


# ------------------------------------------------------------------------------------------------------------ inprocess
# All stages in the engine's own process: for one stage, for tests, and, under a virtual clock, for simulation.


class InProcessPipeline:
    """Runs the stages whenever it is polled, as far as the clock allows.

    ``entrance`` is the link from the engine to the first stage. ``drafter`` is the one-stage pipeline of the learned
    drafter that reads these stages' features.
    """

    def __init__(
        self,
        drivers: Sequence[StageDriver],
        clock: Clock,
        entrance: Link = REAL_LINK,
        drafter: InProcessPipeline | None = None,
        vocab_size: int = MOST,
        exact: bool = False,
    ) -> None:
        self.exact = exact
        self._drafter = drafter
        self.stages = len(drivers)
        self.drivers = drivers
        self._clock = clock
        self._end = EngineEnd(clock, entrance, vocab_size)
        self._dues = [math.inf] * len(drivers)
        """Time at which each driver has something to do; asked again only after a message to it or a step of it."""

    @property
    def ready(self) -> bool:
        return self._end.ready

    def joined(self) -> bool:
        return True

    @property
    def lost(self) -> bool:
        return False

    @property
    def last_heartbeat(self) -> list[float]:
        """The present moment: the stages are as alive as the engine."""
        return [self._clock.now()] * self.stages

    @property
    def rank_bytes(self) -> list[list[int]]:
        return [[] for _ in range(self.stages)]

    def submit(self, batch: Batch) -> None:
        self.tell(0, batch, self._end.sending(batch))

    def cancel(self, message: Cancel) -> None:
        arrives = self._end.sending(message)
        for index in range(self.stages):
            self.tell(index, message, arrives)  # a batch that waits for features may now wait for fewer

    def prepare_grammar(self, request: int, grammar: str) -> None:
        """Do nothing: no other process could compile meanwhile. The last stage compiles when it needs a grammar."""

    def has_grammar(self, request: int) -> bool:
        return True

    def forget_grammar(self, request: int) -> None:
        pass

    def poll(self) -> list[Result]:
        self._work()
        return self._end.arrived()

    @property
    def due(self) -> float | None:
        due, of_engine = min(self._dues), self._end.due
        if of_engine is not None:
            return min(due, of_engine)
        return None if due == math.inf else due

    def tell(self, stage: int, message: Message, arrives: float = 0.0) -> None:
        self._hand_over(stage, message, None, arrives)

    def listen(self, listener: Callable[[Message], bool]) -> None:
        self._end.listener = listener

    def tap(self, layers: tuple[int, ...]) -> TapSpec:
        return TapSpec(layers=layers, address=self.address, session="")

    @property
    def address(self) -> str:
        """The pipeline's name among those of its process."""
        return str(id(self))

    def close(self) -> None:
        pass

    def release(self) -> None:
        pass

    def _work(self) -> None:
        """Let the stages do everything that is due by now, in the order of their moments."""
        # One driver at a time: what it sends may make another one due earlier than those that are looked at now. Of
        # equal moments the earlier stage's comes first.
        while (due := min(self._dues)) <= self._clock.now():
            index = self._dues.index(due)
            for sent in self.drivers[index].step():
                self._deliver(index, sent)
            self._ask_due(index)

    def _receive(self, message: Message, arrives: float) -> None:
        """Take in a stage's message to the engine."""
        if not self._end.received(message, arrives):
            raise ProtocolError(f"unexpected {type(message).__name__} to the engine")

    def _deliver(self, index: int, sent: Outgoing) -> None:
        if sent.to == "drafter":
            assert self._drafter is not None
            self._drafter._hand_over(0, sent.message, sent.tensor, sent.arrives)
            return
        # The engine is at both ends: -1 before the first stage, and one beyond the last.
        to = {"upstream": index - 1, "downstream": index + 1, "engine": self.stages}[sent.to]
        if 0 <= to < self.stages:
            self._hand_over(to, sent.message, sent.tensor, sent.arrives)
        else:
            self._receive(sent.message, sent.arrives)

    def _hand_over(self, index: int, message: Message, tensor: Any, arrives: float) -> None:
        self.drivers[index].on_message(message, tensor, arrives)
        self._ask_due(index)

    def _ask_due(self, index: int) -> None:
        due = self.drivers[index].due
        self._dues[index] = math.inf if due is None else due


class InProcessExecutor:
    """Runs whole engines, models included, in one process. Under a virtual clock all runs are alike."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pipelines: dict[str, InProcessPipeline] = {}
        """Address -> pipeline."""

    def now(self) -> float:
        return self._clock.now()

    def wait(self, until: float | None) -> None:
        self._clock.wait(until)

    def wake(self) -> None:
        self._clock.wake()

    def end_unused(self) -> None:
        pass

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> InProcessPipeline:
        layers = [self.layers(plan) for plan in plans]
        cores = [make_core(plan, i, len(plans), layers[i]) for i, plan in enumerate(plans)]
        drivers = [make_driver(plan, i, cores[i], self.now) for i, plan in enumerate(plans)]
        readers = [self._pipelines[plan.tap.address] for plan in plans if plan.tap is not None]
        reader = readers[0] if readers else None
        pipeline = InProcessPipeline(
            drivers, self, entrance(plans[0]), reader, plans[0].vocab_size, all(one.exact for one in layers)
        )
        self._pipelines[pipeline.address] = pipeline
        return pipeline

    def layers(self, plan: StagePlan) -> Any:
        """The layers of one stage of a pipeline that begins."""
        return load_layers(plan)

    def close(self) -> None:
        self._pipelines.clear()
