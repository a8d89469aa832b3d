"""A whole engine in one process, over real models: the same loop, stages and drafter that ``LLM`` runs as processes.

Time is virtual: every stage takes a second and a drafter a third of one, so batches overlap as on real devices, and
each run is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import even_split
from penstock.cluster.timing import DeviceTiming, StageTiming
from penstock.core import FinishReason
from penstock.drafters.base import DRAFTERS, Drafter, DrafterParts
from penstock.drafters.learned import LearnedDrafter, SmallModelDrafter
from penstock.emulation.cluster import EmulatedDrafter
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.engine.build import tapped_layers
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.files import AUTO
from penstock.messages import SampledToken, Sampling
from penstock.models.graphs import Recorder
from penstock.models.speculators.open import load_speculator_stage, open_speculator
from penstock.models.stage_model import load_stage
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.stage.driver import StageCore, StageDriver
from penstock.strategies.base import Strategy


class Picks:
    """Collects one request's picks."""

    def __init__(self) -> None:
        self.picks: list[SampledToken] = []

    @property
    def tokens(self) -> list[int]:
        return [pick.token for pick in self.picks]

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        self.picks.append(pick)
        return None

    def detokenize_pending(self) -> None:
        pass

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        pass


class InProcessEngine:
    """Stages of ``target``, and a drafter: the model in ``draft``, one that the caller made, or a learned one."""

    def __init__(
        self,
        target: Path,
        stages: int,
        draft: Path | Drafter | None = None,
        slots: int = 2048,
        learned: Path | None = None,
        post_state: bool = False,
        ahead: int | None = None,
        quantization: str = "none",
        dtype: str = "float32",
        gives_back: bool = False,
        chunk: int = 16,
        device: str = "cpu",
        numerics: str = AUTO,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        """Records the target's steps, as CUDA graphs do on a GPU."""
        self._quantization, self._dtype = quantization, dtype
        self._device, self._numerics = device, numerics
        self._gives_back = gives_back
        self.pool = SlotPool(slots, slots, sharing=not gives_back)
        self.clock = VirtualClock()
        self._numbers = itertools.count()
        layers = even_split(open_checkpoint(str(target)).num_layers, stages)
        taps: list[tuple[int, ...]] = [()] * stages
        reading: InProcessPipeline | None = None
        self.drafter: LearnedDrafter
        if learned is not None:
            self.reader = load_speculator_stage(
                str(learned), str(target), capacity=self.pool.total, dtype="float32", device=device
            )
            taps = tapped_layers(layers, self.reader.store.layers)
            core = StageCore(self.reader, self.pool.total, is_last=True)  # type: ignore[arg-type]
            core.reader = self.reader
            reading = InProcessPipeline([StageDriver(0, core, self.clock.now)], self.clock)
            speculator = open_speculator(str(learned), open_checkpoint(str(target)))
            options = DRAFTERS[speculator.kind](
                **({"post_state": True} if post_state else {}), **({} if ahead is None else {"ahead": ahead})
            )
            parts = DrafterParts(0, layers, 256, speculator, answer=lambda request: [], start_weights=lambda: reading)
            draft = options.start(parts)
            assert isinstance(draft, LearnedDrafter)
            self.drafter = draft
        if isinstance(draft, Path):
            whole = [(0, open_checkpoint(str(draft)).num_layers)]
            draft = SmallModelDrafter(self._pipeline(draft, whole, None), chunk=256)
        assert draft is not None
        drafter = EmulatedDrafter(draft, taking(0.33), None, self.clock)
        scheduler = Scheduler(self.pool, chunk=chunk, max_running=64, max_model_len=512)
        pipeline = self._pipeline(target, layers, taking(1.0), taps, reading)
        self.loop = EngineLoop(pipeline, drafter, scheduler, self.clock)

    def _pipeline(
        self,
        model: Path,
        layers: list[tuple[int, int]],
        timing: StageTiming | None,
        taps: Sequence[tuple[int, ...]] = ((),),
        reading: InProcessPipeline | None = None,
    ) -> InProcessPipeline:
        drivers = []
        for index, (first, last) in enumerate(layers):
            stage = load_stage(
                str(model),
                first,
                last,
                capacity=self.pool.total,
                dtype=self._dtype,
                device=self._device,
                quantization=self._quantization,
                numerics=self._numerics,
                gives_back=self._gives_back,
            )
            if self._recorder is not None:
                stage.record_steps(self._recorder)
            stage.tap(taps[index])
            core = StageCore(stage, self.pool.total, is_last=index == len(layers) - 1, taps=taps[index])
            drivers.append(emulated_driver(index, core, self.clock.now, StageEmulation(timing=timing)))
        return InProcessPipeline(drivers, self.clock, drafter=reading)

    def submit(self, prompt: list[int], sampling: Sampling, max_tokens: int, strategy: Strategy) -> Request:
        request = Request(next(self._numbers), prompt, sampling, max_tokens, frozenset(), strategy, Picks())
        self.loop.add(request)
        return request

    def run(self) -> None:
        """Step until every request has ended."""
        while self.loop.busy:
            self.loop.step()
        self.loop.audit()


def taking(seconds: float) -> StageTiming:
    """A modelled device that takes this many seconds for any batch."""
    return StageTiming(devices=(DeviceTiming(seconds, 0.0, 0.0),))
