"""The cost of deciding: the engine's loop and a stage's bookkeeping per step, without model, sockets or waiting.

    python -m benchmarks.costs.decisions [STEPS]

The loop runs over a belt that takes one batch of up to 64 rows per step and returns it 64 steps later, with a drafter
that answers three times per step: about 2,000 drafted nodes are alive at once. Candidates follow a stated profile.

A step of the engine is everything between one result and the next: taking the result in, committing, pruning,
cancelling, taking drafts in, asking, choosing rows, building the batch. A step of a stage is the batch's header and the
slots that each of its rows sees. The belt's and the drafter's own time is left out. Times are the thread's own on a
core (``time.thread_time``), so that other programs do not count.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.shared.benchmark import show
from benchmarks.shared.outputs import Deaf
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import ScriptedDrafter
from penstock.messages import Batch, Cancel, Result, SampledToken, Sampling, Span
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.stage.visibility import Visibility
from penstock.strategies.auto import Auto, Continuous
from penstock.strategies.base import Strategy
from penstock.strategies.flowspec import FlowSpec, FlowSpecOptions
from penstock.strategies.pipedec import PipeDec

STAGES, WIDTH, CHILDREN, PASSES = 64, 64, 16, 3
RUNS = 3
STEP = 0.010
WARM_UP = 3 * STAGES
ACCURACY = [0.97, 0.985, 0.99] + [0.99 + 0.01 * (i + 1) / 13 for i in range(13)]
FLOWSPEC = FlowSpecOptions(tree_size=20 * WIDTH, tree_depth=8, segment=WIDTH, children=CHILDREN, expansion_depth=8)

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "continuous": lambda: Continuous(WIDTH, CHILDREN),
    "auto": lambda: Auto(WIDTH, CHILDREN),
    "pipedec": lambda: PipeDec(STAGES, WIDTH, CHILDREN),
    "flowspec": lambda: FlowSpec(19, FLOWSPEC),
}


class Stopwatch:
    """Seconds of one step, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, owner: object, *methods: str) -> None:
        """Count the time of these methods of one object."""
        for method in methods:
            setattr(owner, method, self._counting(part, getattr(owner, method)))

    def _counting(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - started

        return run

    def take(self) -> dict[str, float]:
        found, self.seconds = self.seconds, {}
        return found


class Moments:
    """A clock that is moved from outside."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def wait(self, until: float | None) -> None:
        pass

    def wake(self) -> None:
        pass


class Belt:
    """Takes the pipeline's place: a batch comes out ``STAGES`` steps after it went in, one per step.

    It has no more of a pipeline than a loop calls that has neither a grammar nor a learned drafter.
    """

    stages = STAGES
    due = None

    def __init__(self, script: Script) -> None:
        self.ready = True
        self.entering: Batch | None = None
        self._script = script
        self._places: deque[Batch | None] = deque([None] * STAGES)
        self._out: list[Result] = []
        self._dead: set[int] = set()

    def move(self) -> None:
        """Move on by one step: the last place's batch comes out, and the first place becomes free."""
        self._places.appendleft(self.entering)
        batch = self._places.pop()
        self.entering, self.ready = None, True
        if batch is not None:
            self._out.append(self._result(batch))

    def _result(self, batch: Batch) -> Result:
        rows = batch.rows
        picks = [
            SampledToken(rows.nodes[row], self._script.after(0, rows.positions[row]))
            for row in batch.wanted
            if rows.nodes[row] not in self._dead
        ]
        took = 0.99 * STEP  # a little less than a step, so that rounding never makes it more
        spans = [Span(i, i * STEP, i * STEP, i * STEP + took, took, took, len(rows)) for i in range(STAGES)]
        return Result(stream=batch.stream, picks=picks, spans=spans)

    def submit(self, batch: Batch) -> None:
        self.entering, self.ready = batch, False

    def cancel(self, message: Cancel) -> None:
        self._dead.update(message.nodes)

    def poll(self) -> list[Result]:
        out, self._out = self._out, []
        return out

    def close(self) -> None:
        pass


class Run:
    """One strategy's loop over the belt, and one stage's bookkeeping beside it."""

    def __init__(self, make: Callable[[], Strategy], steps: int) -> None:
        script = profile_script(ACCURACY, 1, 3 * steps, seed=0, prompt=1)
        pool = SlotPool(script.tokens + 1, 4 * WIDTH * STAGES)
        self.belt, self.clock, self.watch = Belt(script), Moments(), Stopwatch()
        drafter = ScriptedDrafter(script)
        scheduler = Scheduler(pool, WIDTH, 1, script.tokens + 1)
        self.loop = EngineLoop(self.belt, drafter, scheduler, self.clock)  # type: ignore[arg-type]
        self.request = Request(0, [0], Sampling(), script.tokens, frozenset(), make(), Deaf())
        self.loop.add(self.request)
        self.visibility = Visibility(pool.total)
        self.watch.timed("outside", self.belt, "submit", "cancel", "poll")
        self.watch.timed("outside", drafter, "ask", "poll")
        self.watch.timed("ask", self.request.strategy, "ask")
        self.watch.timed("choose", self.request.strategy, "ready_at", "enter")
        self.watch.timed("batch", self.loop.builder, "batch")
        self.watch.timed("loop", self.loop, "step")
        self.watch.timed("stage", self, "on_stage")

    def step(self) -> dict[str, float]:
        """Run one step of the belt. Returns seconds by part."""
        self.belt.move()
        for _ in range(PASSES):
            self.loop.step()
            self.clock.moment += STEP / PASSES
        if self.belt.entering is not None:
            self.on_stage(self.belt.entering)
        found = self.watch.take()
        found["engine"] = found.pop("loop") - found.pop("outside")
        found["take in"] = found["engine"] - sum(found.get(part, 0.0) for part in ("ask", "choose", "batch"))
        return found

    def on_stage(self, batch: Batch) -> None:
        self.visibility.apply_header(batch)
        self.visibility.view(batch, batch.alive)


PARTS = ("take in", "ask", "choose", "batch", "engine", "stage", "total")
"""Parts of a step; the last is the engine's and one stage's together."""


def measured(steps: int = 500) -> list[dict[str, Any]]:
    """The fastest of ``RUNS`` runs of each strategy. All runs decide the same, and a shared machine has
    slow moments."""
    runs = [[figures_of(name, make, steps) for name, make in STRATEGIES.items()] for _ in range(RUNS)]
    return [min(same, key=lambda run: run["ms"]["total"][0]) for same in zip(*runs, strict=True)]


def figures_of(name: str, make: Callable[[], Strategy], steps: int) -> dict[str, Any]:
    """One run: means of live nodes, rows and tokens per step; milliseconds by part, median and 95th percentile."""
    run = Run(make, WARM_UP + steps)
    for _ in range(WARM_UP):
        run.step()
    times, live, rows, first = [], [], [], run.request.produced
    for _ in range(steps):
        live.append(run.request.tree.size)
        found = run.step()
        rows.append(0 if run.belt.entering is None else len(run.belt.entering.rows))
        times.append([found.get(part, 0.0) for part in PARTS[:-1]])
    table = 1e3 * np.array(times)
    table = np.column_stack([table, table[:, -2:].sum(axis=1)])
    spread = zip(np.median(table, axis=0).tolist(), np.percentile(table, 95, axis=0).tolist(), strict=True)
    return {
        "strategy": name,
        "live": float(np.mean(live)),
        "rows": float(np.mean(rows)),
        "tokens": (run.request.produced - first) / steps,
        "ms": dict(zip(PARTS, spread, strict=True)),
    }


if __name__ == "__main__":
    show(measured(int(sys.argv[1]) if len(sys.argv) > 1 else 500))
