"""A whole engine in one process, over real models: the same loop, stages and drafter that ``LLM`` runs as processes."""

from __future__ import annotations

import itertools
from pathlib import Path

from penstock.core import FinishReason
from penstock.drafters.base import Drafter
from penstock.drafters.ngram import NgramDrafter
from penstock.drafters.small_model import SmallModelDrafter
from penstock.engine.loop import EngineLoop
from penstock.engine.request import Request
from penstock.engine.scheduler import Scheduler
from penstock.engine.slots import SlotPool
from penstock.messages import Pick, Sampling
from penstock.models.checkpoint import even_split, open_checkpoint
from penstock.models.stage_model import load_stage
from penstock.pipeline.clock import RealClock
from penstock.pipeline.inprocess import InProcessPipeline
from penstock.stage.core import StageCore
from penstock.stage.driver import StageDriver
from penstock.strategies.base import Strategy


class Picks:
    """Collects one request's picks."""

    def __init__(self) -> None:
        self.picks: list[Pick] = []

    @property
    def tokens(self) -> list[int]:
        return [pick.token for pick in self.picks]

    def append(self, pick: Pick, at: float) -> FinishReason | None:
        self.picks.append(pick)
        return None

    def finish(self, reason: FinishReason, at: float) -> None:
        pass


class InProcessEngine:
    """Stages of ``target`` and, as the drafter, the model in ``draft`` (prompt lookup where there is none)."""

    def __init__(self, target: Path, stages: int = 2, draft: Path | None = None, slots: int = 2048) -> None:
        self.pool = SlotPool(slots, slots)
        self._numbers = itertools.count()
        layers = even_split(open_checkpoint(str(target)).num_layers, stages)
        drafter: Drafter = NgramDrafter()
        if draft is not None:
            drafter = SmallModelDrafter(self._pipeline(draft, [(0, open_checkpoint(str(draft)).num_layers)]), chunk=256)
        scheduler = Scheduler(self.pool, stages, chunk=16, max_running=64, max_model_len=512)
        self.loop = EngineLoop(self._pipeline(target, layers), drafter, scheduler, RealClock())

    def _pipeline(self, model: Path, layers: list[tuple[int, int]]) -> InProcessPipeline:
        drivers = []
        for index, (first, last) in enumerate(layers):
            stage = load_stage(str(model), first, last, capacity=self.pool.total)
            core = StageCore(stage, self.pool.total, is_last=index == len(layers) - 1)
            drivers.append(StageDriver(index, core, RealClock().now))
        return InProcessPipeline(drivers, RealClock())

    def submit(self, prompt: list[int], sampling: Sampling, max_tokens: int, strategy: Strategy) -> Request:
        request = Request(next(self._numbers), prompt, sampling, max_tokens, frozenset(), strategy, Picks())
        self.loop.add(request)
        return request

    def run(self) -> None:
        """Until every request has ended."""
        while self.loop.busy:
            self.loop.step()
        self.loop.audit()
