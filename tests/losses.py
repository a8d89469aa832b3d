"""Random histories in which stages and drafters are lost at any moment, and replaced after any time.

python -m tests.losses 10000           # that many, from seed 0
python -m tests.losses 10000 50000     # from seed 50000
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Generator
from typing import Final

from penstock.core import PipelineError, PipelineLost
from penstock.drafters.base import Drafter
from penstock.drafters.learned import LearnedDrafter, SmallModelDrafter
from penstock.drafters.merged import NgramDrafter
from penstock.emulation.cluster import EmulatedDrafter
from penstock.engine.recovery import MOST_LOSSES, Recovery
from penstock.messages import Batch, Result
from penstock.pipeline.engine_end import InProcessPipeline
from tests.hash_model import HashLayers
from tests.histories import History, UnrulyPipeline, run_many

PATIENCE: Final = 1e9
"""Seconds of virtual time: no recovery takes longer."""


class Breakable(InProcessPipeline):
    """A pipeline that, once ``broken``, reports nothing but its loss."""

    broken = False

    @property
    def ready(self) -> bool:
        return super().ready and not self.broken

    @property
    def lost(self) -> bool:
        return self.broken

    def submit(self, batch: Batch) -> None:
        assert not self.broken
        super().submit(batch)

    def poll(self) -> list[Result]:
        if self.broken:
            raise PipelineLost("a stage was lost: by chance")
        return super().poll()

    @property
    def due(self) -> float | None:
        return 0.0 if self.broken else super().due


class BreakableTarget(Breakable, UnrulyPipeline):
    pass


class LossyHistory(History):
    """One random engine that loses its stages and its drafter now and then."""

    target_kind = BreakableTarget
    drafter_kind = Breakable

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts = RandomParts(self)
        self.loop.recovery = self.recovery = Recovery(self.parts, self.clock, PATIENCE)
        self.losses = 0
        self._in_row = self._tokens = 0

    def _drafter(self) -> EmulatedDrafter:
        self._draws = self.rng.randrange(2**32)
        return self.another_drafter()

    def another_drafter(self) -> EmulatedDrafter:
        """A drafter made by the same draws as the first one."""
        rng, self.rng = self.rng, random.Random(self._draws)
        drafter, self.rng = super()._drafter(), rng
        return drafter

    def another_pipeline(self, drafter: EmulatedDrafter) -> UnrulyPipeline:
        self.layers[:] = [HashLayers(stage, self.pool.total, self.vocabulary) for stage in range(self.stages)]
        return self._pipeline(drafter)

    def _check_replicas(self) -> None:
        super()._check_replicas()
        if self.recovery.due < math.inf:
            self._tokens = self.loop.tokens
        elif self.rng.random() < 0.02:
            self._lose()

    def _lose(self) -> None:
        """Break something, but not so often without a token that a request is taken for the cause."""
        requests = self.loop.running
        self._in_row = 0 if self.loop.tokens > self._tokens else self._in_row
        if self._in_row == MOST_LOSSES - 1 or any(one.losses == MOST_LOSSES - 1 for one in requests):
            return
        weights = weights_of(self.parts.drafter)
        self.rng.choice([self.parts.pipeline, *([weights] if weights else [])]).broken = True
        self._tokens = self.loop.tokens
        self._in_row += 1
        self.losses += 1


class RandomParts:
    """A history's pipeline and drafter. What replaces them takes its time, and may fail to start."""

    apart: frozenset[int] = frozenset()

    def __init__(self, history: LossyHistory) -> None:
        pipeline = history.loop.pipeline
        assert isinstance(pipeline, BreakableTarget)
        self.pipeline = pipeline
        self.drafter: Drafter = history.drafter
        self._history = history
        self._lacks_drafter = False

    def drop_lost(self) -> bool:
        weights, learned = weights_of(self.drafter), isinstance(inner_of(self.drafter), LearnedDrafter)
        lost_drafter = weights is not None and weights.broken
        if self.pipeline.broken or (lost_drafter and learned):
            self.pipeline.broken = True
        if lost_drafter or (self.pipeline.broken and learned):
            self.drafter, self._lacks_drafter = NgramDrafter(3, 1), True
        return self.pipeline.broken

    def drop_stages(self) -> None:
        self.pipeline.broken = True
        self.drop_lost()

    @property
    def out_of_place(self) -> bool:
        return self._history.rng.random() < 0.02

    @property
    def drafter_is_back(self) -> bool:
        return False

    @property
    def may_return(self) -> bool:
        return False

    def start(self) -> Generator[float | None]:
        history = self._history
        yield from self._wait()
        if self._lacks_drafter:
            self.drafter, self._lacks_drafter = history.another_drafter(), False
        if self.pipeline.broken:
            yield from self._wait()
            if history.rng.random() < 0.2:
                raise PipelineError("a stage cannot start: by chance")
            pipeline = history.another_pipeline(self._emulated)
            assert isinstance(pipeline, BreakableTarget)
            self.pipeline = pipeline
        history._share_device(self._emulated, self.pipeline)

    @property
    def _emulated(self) -> EmulatedDrafter:
        assert isinstance(self.drafter, EmulatedDrafter)
        return self.drafter

    def _wait(self) -> Generator[float | None]:
        clock = self._history.clock
        until = clock.now() + self._history.rng.choice([0.0, 0.5, 30.0])
        while clock.now() < until:
            yield until


def inner_of(drafter: Drafter) -> Drafter:
    return drafter.inner if isinstance(drafter, EmulatedDrafter) else drafter


def weights_of(drafter: Drafter) -> Breakable | None:
    inner = inner_of(drafter)
    weights = inner.pipeline if isinstance(inner, SmallModelDrafter) else None
    assert weights is None or isinstance(weights, Breakable)
    return weights


if __name__ == "__main__":
    logging.disable()
    run_many(*map(int, sys.argv[1:] or ["1000"]), kind=LossyHistory)
