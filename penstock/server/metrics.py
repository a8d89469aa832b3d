"""``/metrics`` for Prometheus: the engine's current counters, and histograms of requests. Names mirror ``vllm:*``."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPMethod
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.served import ServedEngine
from penstock.engine.stats import EngineStats
from penstock.server.http.middleware import Record
from penstock.server.openai.generation import Summary

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

GAUGES: Final = {
    "num_requests_running": ("running", "Requests that the engine works on."),
    "num_requests_waiting": ("waiting", "Requests in the queue."),
    "kv_slots": ("kv_slots", "Tokens for which every stage has room."),
    "kv_slots_used": ("kv_used", "Of these, tokens of requests that run."),
    "kv_slots_cached": ("kv_cached", "Of these, tokens that only the prefix cache keeps."),
    "speculative_slots": ("speculative_slots", "Drafted tokens for which there is room."),
    "speculative_slots_used": ("speculative_used", "Drafted tokens that are live."),
    "batches_in_flight": ("batches_in_flight", "Batches in the pipeline."),
    "rows_in_flight": ("rows_in_flight", "Their rows."),
}
COUNTERS: Final = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Of these, tokens that were there."),
    "num_preemptions": ("preemptions", "Requests that gave their slots up and were computed again."),
    "recoveries": ("recoveries", "Times that requests waited for the replacement of a lost stage, and went on."),
    "recovery_seconds": ("recovery_seconds", "How long they waited."),
    "drafter_losses": ("drafter_losses", "Times that the drafter was lost while requests went on."),
    "spec_decode_num_drafts": ("drafts", "Trees that were drafted."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Drafted tokens."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens that became part of a text."),
    "spec_decode_num_misses": ("misses", "Tokens that had not been drafted."),
    "rows_entered": ("rows_entered", "Rows that entered the pipeline."),
    "rows_cancelled": ("rows_dead", "Rows that were pruned in flight."),
    "emulated_passes": ("emulated_passes", "Batches that emulated stages have computed."),
    "emulated_overruns": ("emulated_overruns", "Of these, batches that really took longer than they were to."),
}


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, llm: ServedEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(llm, model))
        ProcessCollector(registry=self.registry)
        self._model = model
        self._responses = Counter(
            "penstock:http_responses", "Responses.", ["method", "route", "status"], registry=self.registry
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "Until the first token.", SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Per token after the first.", TOKEN_SECONDS
        )
        self._seconds = self._histogram("e2e_request_latency_seconds", "Until the last token.", SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        outlines = Counter(
            "penstock:outline_answers",
            "Answers that were asked for with outline_decoding, by how they came about: in points, or plain.",
            ["model_name", "decoded"],
            registry=self.registry,
        )
        self._outlines = {used: outlines.labels(model, "points" if used else "plain") for used in (True, False)}
        text = "Points of answers, decoded side by side."
        self._points = Counter("penstock:outline_points", text, ["model_name"], registry=self.registry).labels(model)
        self._generation = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)

    def responded(self, record: Record) -> None:
        method = record.method if record.method in HTTPMethod.__members__ else "other"  # else clients could name series
        self._responses.labels(method, record.route, str(record.status)).inc()

    def generated(self, summary: Summary) -> None:
        """Count a generation that has ended, early or not."""
        self._prompt.observe(summary.prompt_tokens)
        self._generation.observe(summary.generated_tokens)
        if summary.outline is not None:
            self._outlines[summary.outline.used].inc()
            self._points.inc(len(summary.outline.points))
        if summary.first_token_seconds is None or summary.last_token_seconds is None:
            return
        self._first_token.observe(summary.first_token_seconds)
        self._seconds.observe(summary.last_token_seconds)
        if summary.generated_tokens > 1:
            self._per_token.observe(summary.decoding_seconds / (summary.generated_tokens - 1))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"penstock:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)


class EngineCollector(Collector):
    """A collector that reads the engine's counters whenever Prometheus asks."""

    def __init__(self, llm: ServedEngine, model: str) -> None:
        self._llm = llm
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        for name, (field, text) in GAUGES.items():
            yield self._gauge(name, text, getattr(stats, field))
        used = stats.kv_used / stats.kv_slots if stats.kv_slots else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the KV slots that is in use (1 is all).", used)
        yield self._gauge("engine_up", "0 once the engine has ended.", float(stats.ended is None))
        recovering = float(stats.recovering is not None)
        yield self._gauge("engine_recovering", "1 while a lost stage is being replaced.", recovering)
        resting = "1 while the weights are freed until a request comes (--idle-timeout)."
        yield self._gauge("engine_resting", resting, float(stats.resting))
        if stats.last_step_seconds_ago is not None:
            yield self._gauge("last_step_age_seconds", "Since the engine's last step.", stats.last_step_seconds_ago)
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"penstock:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], getattr(stats, field))
            yield counter
        yield self._finished(stats)
        yield from self._stages(stats)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"penstock:{name}", text, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge

    def _finished(self, stats: EngineStats) -> Metric:
        text = "Requests that have ended, by reason."
        finished = CounterMetricFamily("penstock:request_success", text, labels=["model_name", "finished_reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([self._model, reason], count)
        return finished

    def _stages(self, stats: EngineStats) -> Iterator[Metric]:
        labels = ["model_name", "stage"]
        busy = CounterMetricFamily("penstock:stage_busy_seconds", "Time a stage spent computing.", labels=labels)
        heard = GaugeMetricFamily("penstock:stage_heartbeat_age_seconds", "Since a stage was heard.", labels=labels)
        for stage, seconds in enumerate(stats.stage_busy_seconds):
            busy.add_metric([self._model, str(stage)], seconds)
        for stage, seconds in enumerate(stats.stage_heard_seconds_ago):
            heard.add_metric([self._model, str(stage)], seconds)
        yield busy
        yield heard
