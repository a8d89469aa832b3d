"""The figures that are kept of one strategy's run of one question when its events are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.grid import Question
from penstock.bench.looping import is_looping
from penstock.bench.measure.hits import HitCounts
from penstock.bench.measure.meter import Meter
from penstock.cluster.timing import LinkTiming
from penstock.core import CompletionOutput, RequestOutput


@dataclass(frozen=True)
class Sample:
    """Seconds count from the request's start, except ``seconds``, which like ``tokens`` counts from the first token."""

    question: Question
    output: RequestOutput
    tokens: int
    seconds: float
    latency_seconds: float
    first_token_seconds: float
    timesteps: int
    hits: HitCounts
    stage_busy: list[float]
    stage_seconds: float
    rows_computed: int
    rows_cancelled: int
    feature_bytes: float
    overruns: tuple[int, int]
    overhead_per_hop: float
    overhead_per_loop: float

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[0]

    @property
    def speed(self) -> float | None:
        """Tokens per second; None where no result after the first token's brought another one."""
        return self.tokens / self.seconds if self.timesteps else None

    @property
    def looping(self) -> bool:
        return is_looping(self.completion.token_ids)

    def as_dict(self) -> dict[str, Any]:
        """The figures by which another bench of the same questions can be compared."""
        return {
            "prompt": self.question.number,
            "prompt_sha256": self.question.prompt_sha256,
            "seed": self.question.params.seed,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "timesteps": self.timesteps,
            "ttft_ms": 1e3 * self.first_token_seconds,
            "e2el_ms": 1e3 * self.latency_seconds,
        }


def sample_of(question: Question, output: RequestOutput, meter: Meter, links: Sequence[LinkTiming] | None) -> Sample:
    """The figures of a watched request; ``links`` are the modelled hops, None where nothing is emulated."""
    completion = output.outputs[0]
    latency, first = completion.seconds or 0.0, completion.first_token_seconds or 0.0
    return Sample(
        question=question,
        output=output,
        tokens=len(completion.token_ids) - 1,
        seconds=latency - first,
        latency_seconds=latency,
        first_token_seconds=first,
        timesteps=meter.lockstep.timesteps,
        hits=meter.hits,
        stage_busy=meter.stage_busy,
        stage_seconds=meter.stage_seconds,
        rows_computed=meter.rows_computed,
        rows_cancelled=meter.rows_cancelled,
        feature_bytes=meter.feature_bytes,
        overruns=meter.overruns,
        overhead_per_hop=meter.overhead_per_hop(links),
        overhead_per_loop=meter.overhead_per_loop(),
    )
