"""Random histories on the hash model: random stages, links, delays, late, early and doubled cancels, requests.

python -m tests.histories 10000           # that many, from seed 0
python -m tests.histories 10000 50000     # from seed 50000
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from penstock.core import FinishReason
from penstock.drafters.base import Drafter, DraftRequest, SyntheticDrafter
from penstock.drafters.learned import BlockDrafter, FollowingDrafter, LearnedDrafter, SmallModelDrafter
from penstock.drafters.merged import MergedDrafter, NgramDrafter, RatedLookup
from penstock.drafters.spd import Depths, SpdDrafter
from penstock.emulation.cluster import DeviceTurns, EmulatedDrafter
from penstock.emulation.device import LinkModel
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.engine.loop import EngineLoop, Observer
from penstock.engine.scheduler import Scheduler
from penstock.estimates.estimates import Estimates
from penstock.messages import Cancel, SampledToken, Sampling
from penstock.models.speculators.block import BlockShape
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.stage.driver import StageCore, StageDriver
from penstock.strategies.auto import Auto, Continuous
from penstock.strategies.base import Autoregressive, Strategy
from penstock.strategies.flowspec import FlowSpec, FlowSpecOptions
from penstock.strategies.pipedec import PipeDec, StaticTree
from tests.hash_model import HashBlock, HashLayers, HashReader, HashSpd, committed_slots, plain_decode, plain_kv

FLOWSPEC_SIZES = {"tree_size": 20, "tree_depth": 4, "segment": 6, "expansion_depth": 3}


class RandomTiming:
    """Random seconds, drawn anew each time, for a stage, drafter or link."""

    latency_s = 0.0

    def __init__(self, rng: random.Random, scale: float) -> None:
        self._rng = rng
        self._scale = scale

    def seconds(self, rows: int, header_bytes: int = 0) -> float:
        return self._scale * self._rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]) * (1 + rows / 16)


class UnrulyPipeline(InProcessPipeline):
    """Delivers cancels early, late, twice, or to some stages only after the batch has passed."""

    def __init__(
        self,
        rng: random.Random,
        drivers: list[StageDriver],
        clock: VirtualClock,
        entrance: LinkModel,
        drafter: InProcessPipeline | None,
    ) -> None:
        super().__init__(drivers, clock, entrance, drafter)
        self._rng = rng
        self._clock = clock

    def cancel(self, message: Cancel) -> None:
        self._end.sending(message)
        for driver in self.drivers:
            for _ in range(self._rng.choice([0, 1, 1, 2])):
                delay = self._rng.choice([0.0, 0.0, 0.5, 3.0, 50.0])
                copy = Cancel(before=message.before, nodes=message.nodes)
                driver.on_message(copy, None, self._clock.now() + delay)


class RestlessDrafter(FollowingDrafter):
    """A drafter that answers again for any earlier nodes, where the strategy takes corrections."""

    def __init__(self, pipeline: InProcessPipeline, chunk: int, rng: random.Random) -> None:
        super().__init__(pipeline, chunk)
        self._rng = rng

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        return super().ask([self._with_corrections(ask) if ask.corrects else ask for ask in asks])

    def _with_corrections(self, ask: DraftRequest) -> DraftRequest:
        asked = {node.id for node in ask.nodes}
        again = [
            node
            for node in ask.request.tree.nodes()
            if node.candidates and node.id not in asked and self._rng.random() < 0.3
        ]
        return replace(ask, nodes=sorted([*again, *ask.nodes], key=lambda node: node.position))


@dataclass
class Collected:
    tokens: list[int] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        self.tokens.append(pick.token)
        return None

    def detokenize_pending(self) -> None:
        pass

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        self.reasons.append(reason)


class Preempted(Observer):
    """Notes which requests have been preempted."""

    def __init__(self, numbers: set[int]) -> None:
        self.numbers = numbers

    def preempted(self, request: Request, at: float) -> None:
        self.numbers.add(request.number)


@dataclass
class History:
    """One random engine with its requests. Its pipelines are of the kinds named here."""

    target_kind: ClassVar[type[UnrulyPipeline]] = UnrulyPipeline
    drafter_kind: ClassVar[type[InProcessPipeline]] = InProcessPipeline

    rng: random.Random
    vocabulary: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        rng = self.rng
        self.preempted: set[int] = set()
        self.vocabulary = rng.choice([2, 4, 8])
        self.stages = rng.randint(1, 6)
        self.clock = VirtualClock()
        self.pool = SlotPool(
            committed_capacity=rng.choice([40, rng.randint(40, 120)]), speculative_quota=rng.choice([0, 3, 20, 100])
        )
        self.layers = [HashLayers(stage, self.pool.total, self.vocabulary) for stage in range(self.stages)]
        self.reads: list[int] = []
        self.drafter = self._drafter()
        pipeline = self._pipeline(self.drafter)
        self._share_device(self.drafter, pipeline)
        scheduler = Scheduler(self.pool, rng.choice([1, 3, 16]), rng.choice([1, 2, 8]), max_model_len=200)
        scheduler.growth = rng.choice([1, 4, 64])
        self.contended = self.pool.total % 3 == 0  # as above
        beside = self.stages == 1 and self.pool.total % 2 == 0
        estimates = Estimates(contended=self.contended, stages=self.stages, drafts_on_stage=beside)
        self.loop = EngineLoop(pipeline, self._beside_lookup(self.drafter), scheduler, self.clock, estimates=estimates)
        self.shared = [rng.randrange(self.vocabulary) for _ in range(rng.choice([0, 20, 60]))]
        self.loop.observers.append(Preempted(self.preempted))
        self.requests = [self._request(number) for number in range(rng.randint(1, 5))]

    def _pipeline(self, drafter: EmulatedDrafter) -> UnrulyPipeline:
        """Build the pipeline over ``layers``; a learned drafter is sent the features that it reads."""
        inner = drafter.inner
        reader = inner.pipeline if isinstance(inner, LearnedDrafter) else None
        drivers = self._drivers(self.layers, self.reads)
        return self.target_kind(self.rng, drivers, self.clock, self._line(), reader)  # type: ignore[arg-type]

    def _beside_lookup(self, drafter: EmulatedDrafter) -> Drafter:
        """Add prompt lookup to the drafter in a quarter of the histories."""
        return MergedDrafter(drafter, RatedLookup(3, 1)) if self.pool.total % 4 == 1 else drafter  # no draw, as below

    def _share_device(self, drafter: EmulatedDrafter, pipeline: UnrulyPipeline) -> None:
        if self.pool.total % 2:  # no draw of its own, which would make another history of every seed
            drafter.share(DeviceTurns(pipeline, self.pool.total % self.stages))

    def _line(self) -> LinkModel:
        return LinkModel(RandomTiming(self.rng, 0.2))  # type: ignore[arg-type]

    def _drivers(self, layers: list[HashLayers], reads: Sequence[int] = ()) -> list[StageDriver]:
        """Build a driver per stage; ``reads`` are the stages whose outputs a learned drafter reads."""
        rng = self.rng
        drivers = []
        for i, one in enumerate(layers):
            core = StageCore(one, self.pool.total, i == len(layers) - 1, [i] if i in reads else [])
            core.reader = one if isinstance(one, HashReader | HashSpd | HashBlock) else None
            down, up, to_drafter = (RandomTiming(rng, scale) for scale in (0.2, 0.1, 0.5))
            speed = RandomTiming(rng, rng.choice([0.1, 1.0, 4.0]))
            stage = StageEmulation(timing=speed, up=up, down=down, to_drafter=to_drafter)  # type: ignore[arg-type]
            drivers.append(emulated_driver(i, core, self.clock.now, stage))
        return drivers

    def _drafter(self) -> EmulatedDrafter:
        rng = self.rng
        kind = rng.choice(
            ["synthetic", "synthetic", "ngram", "small", "small", "learned", "learned", "spd", "spd", "block"]
        )
        if kind == "synthetic":
            profile = sorted(rng.random() for _ in range(min(4, self.vocabulary - 1)))
            inner: Drafter = SyntheticDrafter(profile, self.vocabulary, rng.randrange(1000), self.plain)
        elif kind == "ngram":
            inner = NgramDrafter(3, 1)
        elif kind == "learned":
            self.reads = sorted(rng.sample(range(self.stages), rng.randint(1, min(3, self.stages))))
            drafting = self.drafter_kind(
                self._drivers([HashReader(self.pool.total, self.vocabulary, self.reads, rng.random() < 0.4)]),
                self.clock,
            )
            inner = RestlessDrafter(drafting, rng.choice([2, 8, 64]), random.Random(rng.randrange(1000)))
        elif kind == "spd":
            levels = [tuple(rng.sample(range(k), rng.randint(0, k))) for k in range(self.stages + 1)]
            self.reads = sorted({stage for level in levels for stage in level})
            drafting = self.drafter_kind(self._drivers([HashSpd(self.pool.total, self.vocabulary, levels)]), self.clock)
            inner = SpdDrafter(drafting, rng.choice([2, 8, 64]), self._depths(levels))
        elif kind == "block":
            self.reads = sorted(rng.sample(range(self.stages), rng.randint(1, min(3, self.stages))))
            markov = rng.choice(["", "vanilla"])
            shape = BlockShape(rng.choice([2, 4, 9]), 0, rng.random() < 0.5, (False,), (None,), markov)
            reader = HashBlock(self.pool.total, self.vocabulary, self.reads, shape)
            drafting = self.drafter_kind(self._drivers([reader]), self.clock)
            inner = BlockDrafter(drafting, rng.choice([2, 8, 64]), shape, rng.choice([None, 0, 1]))
        else:
            layers = [HashLayers(0, self.pool.total, self.vocabulary)]
            drafting = self.drafter_kind(self._drivers(layers), self.clock)
            inner = SmallModelDrafter(drafting, chunk=rng.choice([2, 8, 64]))
        timing = RandomTiming(rng, rng.choice([0.1, 1.0, 5.0]))
        return EmulatedDrafter(inner, timing, None, self.clock)  # type: ignore[arg-type]

    def _depths(self, levels: Sequence[Sequence[int]]) -> Depths:
        """Draw the level of a token by its depth: any level that has its features, or the paper's own choice."""
        rng = self.rng
        memory = rng.random() < 0.3
        of_depth = list(range(len(levels))) if memory else [rng.randint(0, depth) for depth in range(len(levels))]
        reading = frozenset(i for i, level in enumerate(levels) if level)
        return Depths(of_depth, reading, rng.choice([0, 0, 1, 2]), rng.choice([0, 0, 1]), memory)

    def _strategy(self) -> Strategy:
        rng = self.rng
        most = self.vocabulary - 1
        if self.contended:  # trials are of requests that all are on trial
            return Auto(rng.randint(1, 12), rng.randint(1, most))
        return rng.choice(
            [
                Autoregressive(),
                PipeDec(self.stages, rng.randint(1, 8), rng.randint(1, most)),
                PipeDec(rng.randint(1, 9), rng.randint(1, 8), rng.randint(1, most)),
                StaticTree(rng.randint(1, 20), rng.randint(1, 5), rng.randint(1, most), 1 + self.pool.total % 3),
                self._flowspec(most),
                Continuous(rng.randint(1, 12), rng.randint(1, most)),
                Auto(rng.randint(1, 12), rng.randint(1, most)),
            ]
        )

    def _flowspec(self, most: int) -> FlowSpec:
        rng = self.rng
        sizes = {name: rng.randint(1, high) for name, high in FLOWSPEC_SIZES.items()}
        switches = {name: rng.random() < 0.7 for name in ("expand", "score_order")}
        return FlowSpecOptions(children=rng.randint(1, most), **sizes, **switches).make(self.stages)

    def _request(self, number: int) -> Request:
        rng = self.rng
        prompt = [rng.randrange(self.vocabulary) for _ in range(rng.randint(1, 20))]
        prompt = [*self.shared[: rng.randint(0, len(self.shared))], *prompt][-(self.pool.committed_capacity - 20) :]
        stop = frozenset({rng.randrange(self.vocabulary)}) if rng.random() < 0.3 else frozenset()
        sampling = Sampling(seed=rng.randrange(100))
        most, whose = rng.randint(1, 20), (rng.choice([0, 0, -1, 1]), rng.choice("ab"))
        return Request(number, prompt, sampling, most, stop, self._strategy(), Collected(), *whose)

    def plain(self, request: Request) -> list[int]:
        return plain_decode(
            request.prompt, self.stages, self.vocabulary, request.sampling.seed, request.max_tokens, request.stop_ids
        )

    def run(self) -> None:
        """Run to the end, aborting now and then; check outputs, replicas, slots and final replies."""
        waiting = list(self.requests)
        aborted = set()
        for _ in range(200_000):
            if waiting and self.rng.random() < 0.3:
                self.loop.add(waiting.pop())
            if self.rng.random() < 0.002 and self.loop.requests:
                victim = self.rng.choice(list(self.loop.requests.values()))
                self.loop.abort(victim)
                aborted.add(victim.number)
            if self.loop.busy:
                self.loop.step()
                self.loop.audit()
            elif not waiting:
                break
            self._check_replicas()
        assert not self.loop.busy, "the engine did not come to an end"
        assert self.pool.committed == self.pool.speculative == self.pool.reserved == self.pool.used == 0
        for request in self.requests:
            self._check_output(request, request.number in aborted)

    def _check_output(self, request: Request, aborted: bool) -> None:
        output = request.output
        assert isinstance(output, Collected)
        expected = self.plain(request)
        assert len(output.reasons) == 1, "exactly one final reply"
        if aborted:
            assert output.tokens == expected[: len(output.tokens)]
            return
        assert output.tokens == expected
        assert output.reasons == [FinishReason.STOP if expected[-1] in request.stop_ids else FinishReason.LENGTH]

    def _check_replicas(self) -> None:
        """Check what each stage holds in the slots of a request's announced committed prefix."""
        if self.rng.random() > 0.05:
            return
        for request in self.loop.scheduler.running:
            if not request.started or request.number in self.preempted:  # a stage may still hold its earlier life
                continue
            tokens = [node.token for node in request.committed]
            expected = plain_kv(tokens, self.stages)
            for stage, layers in enumerate(self.layers):
                core = self.loop.pipeline.drivers[stage].core  # type: ignore[attr-defined]
                slots = committed_slots(core.visibility).get(request.number, [])
                assert slots == [node.slot for node in request.committed[: len(slots)]]
                root = None if request.prefilling else request.tree.root
                done = [p for p in range(len(slots)) if request.committed[p] is not root]
                entered = [p for p in done if request.committed[p].picked is not None]
                for p in entered:
                    assert layers.kv[slots[p]] == expected[stage][p], f"stage {stage} position {p}"


def run_many(count: int, first_seed: int = 0, kind: type[History] = History) -> None:
    started = time.monotonic()
    for seed in range(first_seed, first_seed + count):
        try:
            kind(random.Random(seed)).run()
        except Exception as error:
            raise AssertionError(f"history {seed} failed") from error
    print(f"{count} histories from seed {first_seed}: all right, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    run_many(*map(int, sys.argv[1:] or ["1000"]))
