"""Figures of one level of load, from its requests' outcomes. Their names are those of ``vllm bench serve``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.bench.serving.client import Outcome
from penstock.bench.serving.counters import Speculation, of_usages
from penstock.bench.serving.options import LATENCIES


@dataclass
class Level:
    """The results at one ``concurrency`` (None: no limit); times in seconds on the client's clock.

    ``asked`` requests were planned; those without an outcome were interrupted. ``counted`` are the server's counters.
    """

    concurrency: int | None
    asked: int
    started: float
    ended: float = math.nan
    outcomes: list[Outcome] = field(default_factory=list)
    counted: Speculation | None = None

    @property
    def name(self) -> str:
        return "no limit" if self.concurrency is None else str(self.concurrency)

    @property
    def completed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]


@dataclass(frozen=True)
class Latency:
    """Latencies in milliseconds; percentiles interpolate linearly between the two nearest values (numpy's default)."""

    mean: float
    median: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One level's figures. Throughputs are per second from the first arrival to the last end.

    Token figures are of the requests with ``usage``; ``without_usage`` counts the others. ``tokens_per_chunk`` is the
    mean number of tokens in a chunk with text. ``request_goodput`` counts requests within all limits.
    """

    concurrency: int | None
    completed: int
    failed: int
    unfinished: int
    without_usage: int
    errors: Mapping[str, int]
    finish_reasons: Mapping[str, int]
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    cached_tokens: int | None
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    tokens_per_chunk: float | None
    latencies: Mapping[str, Latency | None]
    """Latencies by the names of ``LATENCIES``; None where nothing was measured."""
    speculation: Speculation | None

    def as_dict(self) -> dict[str, Any]:
        """All figures in one dict, with latencies as ``mean_ttft_ms`` and so on."""
        flat = asdict(self)
        for name, latency in flat.pop("latencies").items():
            figures = latency or dict.fromkeys(("mean", "median", "p90", "p99"))
            flat |= {f"{figure}_{name}_ms": value for figure, value in figures.items()}
        return flat


def summarize(level: Level, goodput: Mapping[str, float]) -> Summary:
    """The figures of a level. ``goodput`` are limits in milliseconds by latency; without any there is no goodput."""
    done = level.completed
    usages = [outcome.usage for outcome in done if outcome.usage is not None]
    output = sum(usage.completion_tokens for usage in usages)
    both = output + sum(usage.prompt_tokens for usage in usages)
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    seconds = level.ended - level.started
    return Summary(
        concurrency=level.concurrency,
        completed=len(done),
        failed=len(level.outcomes) - len(done),
        unfinished=level.asked - len(level.outcomes),
        without_usage=len(done) - len(usages),
        errors=dict(Counter(outcome.error for outcome in level.outcomes if outcome.error is not None)),
        finish_reasons=dict(Counter(outcome.finish_reason or "none" for outcome in done)),
        duration=seconds,
        total_input_tokens=both - output,
        total_output_tokens=output,
        cached_tokens=sum(cached) if cached else None,
        request_throughput=len(done) / seconds,
        output_throughput=output / seconds,
        total_token_throughput=both / seconds,
        request_goodput=sum(is_good(outcome, goodput) for outcome in done) / seconds if goodput else None,
        tokens_per_chunk=tokens_per_chunk(done),
        latencies={name: latency_of(seconds_of(done, name)) for name in LATENCIES},
        speculation=level.counted or of_usages(usages),
    )


def seconds_of(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """All values of a latency in seconds: one per gap for inter-token latency, else one per request that has it."""
    if name == "itl":
        return [gap for outcome in outcomes for gap in outcome.gaps]
    values = [getattr(outcome, name) for outcome in outcomes]
    return [value for value in values if value is not None]


def latency_of(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    median, p90, p99 = np.percentile(values, (50, 90, 99))
    return Latency(float(values.mean()), float(median), float(p90), float(p99))


def is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether a request kept all limits; a latency that it does not have (with a single token) is within its limit."""
    times = ((getattr(outcome, name), limit) for name, limit in goodput.items())
    return all(value is None or 1e3 * value <= limit for value, limit in times)


def tokens_per_chunk(outcomes: Sequence[Outcome]) -> float | None:
    known = [outcome for outcome in outcomes if outcome.usage is not None and outcome.first is not None]
    chunks = sum(1 + len(outcome.gaps) for outcome in known)
    return sum(outcome.usage.completion_tokens for outcome in known if outcome.usage) / chunks if chunks else None


def same_texts(level: Level, first: Level) -> tuple[int, int]:
    """Number of requests with the same text in both levels, and number of requests that both answered."""
    texts = {outcome.index: outcome.text for outcome in first.completed}
    pairs = [(outcome.text, texts[outcome.index]) for outcome in level.completed if outcome.index in texts]
    return sum(one == other for one, other in pairs), len(pairs)
