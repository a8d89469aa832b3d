"""Layers that differ: plans by kind of layer beside plans by the mean of all, in processor time of real stages.

    python -m benchmarks.strategies.layer_kinds [--repeats N]

Random checkpoints: hybrids of Qwen3.5's pattern, three gated delta nets and one layer that attends, and of
Nemotron-H's, whose layers are a mixer, attention or a feed-forward network alone; and a mixture of experts whose first
layers are dense, as DeepSeek's. A profile is taken as ``penstock profile`` takes it, except that stages run in this
process, on one thread, and a stage's time is the processor time that it takes: other work on the host counts less. The
layers are then split over stages on equal devices such that the slowest stage is as fast as it can be, by the kinds'
times and by their mean. Where the splits differ, both are loaded and compute the same batches in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from benchmarks.shared.benchmark import Benchmark, show
from penstock.cluster.spec import Cluster, Device, LayerTimes, Link, Links, ModelPrice, Stage
from penstock.engine.build import stage_plans
from penstock.engine.options import EngineOptions
from penstock.engine.profile.measure import (
    CHUNK,
    Bench,
    Candidate,
    MeasuredText,
    candidates_on,
    contexts_within,
    in_parts,
    measured_times,
)
from penstock.engine.resolve import Resolved
from penstock.hosts.placement import HERE
from penstock.pipeline.inprocess import InProcessExecutor
from penstock.planner.costs import Batch, problem_of
from penstock.planner.partition import least_slowest
from tests.checkpoints import make_checkpoint

NAME, HOW = "layer_kinds", "Measured, random weights, processor time of one thread"
STAGES: Final = (2, 3, 6)
ROWS: Final = (1, 16)
LENGTH, CONTEXT = 768, 512
SIZES: Final[dict[str, Any]] = {
    "num_hidden_layers": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
HYBRID: Final[dict[str, Any]] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 4,
}
NEMOTRON: Final[dict[str, Any]] = {
    "layers_block_type": [*(["linear_attention", "mlp"] * 3), "full_attention", "mlp"] * 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
}
MIXTURE: Final[dict[str, Any]] = {
    "first_k_dense_replace": 3,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Qwen3.5's pattern": ("qwen3_5", SIZES | HYBRID),
    "Nemotron-H's pattern": ("nemotron_h", SIZES | NEMOTRON),
    "three dense layers, then experts": ("glm4_moe", SIZES | MIXTURE),
}


class ProcessorClock:
    """The processor time of this process as a clock: nothing in it ever waits."""

    now = staticmethod(time.process_time)

    def wait(self, until: float | None) -> None:
        raise AssertionError("stages in this process are never waited for")

    def wake(self) -> None:
        pass


def measured(repeats: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [found for name in MODELS for found in of_model(name, repeats)]


def of_model(name: str, repeats: int) -> Iterator[dict[str, Any]]:
    """The times of the model's kinds, and both plans for each number of stages and rows."""
    architecture, sizes = MODELS[name]
    with TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), architecture, **sizes)
        options = EngineOptions(
            model=folder, max_model_len=LENGTH, threads=1, quantization="none", speculative_config=None
        )
        found = candidates_on(options, [HERE], {})
        (candidate,), price = found.devices.values(), found.price
        times = profile_of(candidate, price)
        yield {"model": name, "kinds": list(price.counts(price.all_layers)), **kinds_ms(times)}
        for stages in STAGES:
            for rows in ROWS:
                yield {
                    "model": name,
                    "stages": stages,
                    "rows": rows,
                    **both(candidate, price, times, stages, rows, repeats),
                }


def profile_of(candidate: Candidate, price: ModelPrice) -> LayerTimes:
    plans, contexts = stage_plans(in_parts(candidate)), contexts_within(LENGTH)
    return measured_times(
        InProcessExecutor(ProcessorClock()), plans, price.layer_kinds, contexts, lambda done, steps: None
    )


def kinds_ms(times: LayerTimes) -> dict[str, Any]:
    """Milliseconds of a layer of each kind, and of the mean, by rows behind CONTEXT tokens."""
    at = times.contexts.index(CONTEXT)
    return {
        "ms": {rows: [grid[times.rows.index(rows)][at] for grid in (*times.kind_ms, times.layer_ms)] for rows in ROWS}
    }


def both(
    candidate: Candidate, price: ModelPrice, times: LayerTimes, stages: int, rows: int, repeats: int
) -> dict[str, Any]:
    """Layers by stage and milliseconds of the slowest stage, predicted and taken, of both plans."""
    alike = replace(price, kinds=(), pattern=()), replace(times, kind_ms=())
    splits = {"kinds": split_of(price, times, stages, rows), "mean": split_of(*alike, stages, rows)}
    found: dict[str, Any] = {"layers": splits}
    problem = problem_of(*cluster_of(price, times, stages, rows))
    ends = {way: [sum(layers[:i]) for i in range(stages + 1)] for way, layers in splits.items()}
    found["predicted_ms"] = {
        way: 1e3 * max(float(problem.stage_s[0, first, last]) for first, last in pairwise(ends[way])) for way in splits
    }
    if splits["kinds"] != splits["mean"]:
        taken = taken_ms(candidate.setup, ends, rows, repeats)
        found["taken_ms"] = {way: [median(stage) for stage in zip(*each, strict=True)] for way, each in taken.items()}
        pairs = zip(taken["mean"], taken["kinds"], strict=True)
        found["ratio"] = median(max(mean) / max(kinds) for mean, kinds in pairs)
    return found


def cluster_of(
    price: ModelPrice, times: LayerTimes, stages: int, rows: int
) -> tuple[Cluster, tuple[Device, ...], Batch]:
    """Equal devices with these times, links that take next to nothing, and the batch to plan for."""
    devices = tuple(
        Device(name=f"d{i}", measured=times, weight_bandwidth_gb_s=1.0, compute_tflops=1.0, overhead_ms=0.0)
        for i in range(stages)
    )
    cluster = Cluster(
        name="equal",
        devices=devices,
        links=Links(local=Link(bandwidth_gbit_s=1000.0, latency_ms=0.0)),
        stages=tuple(Stage(devices=(device.name,)) for device in devices),
        engine="d0",
        as_model=price,
    )
    return cluster, devices, Batch(rows, CONTEXT)


def split_of(price: ModelPrice, times: LayerTimes, stages: int, rows: int) -> list[int]:
    parts = least_slowest(problem_of(*cluster_of(price, times, stages, rows)), range(stages))
    assert parts is not None
    return [part.layers for part in parts]


def taken_ms(whole: Resolved, ends: dict[str, list[int]], rows: int, repeats: int) -> dict[str, list[list[float]]]:
    """[repeats][stages] milliseconds of processor time, by split, in turn."""
    benches = {
        way: (Bench(*started(whole, each)), MeasuredText(whole.checkpoint.vocab_size)) for way, each in ends.items()
    }
    for bench, text in benches.values():
        while text.tokens < CONTEXT:
            bench.seconds(text.advance(CHUNK))
    found: dict[str, list[list[float]]] = {way: [] for way in benches}
    for i in range(repeats + 1):
        for way, (bench, text) in benches.items():
            seconds = bench.seconds(text.attempt(rows))
            if i:  # the first one warms up
                found[way].append([1e3 * one for one in seconds])
    return found


def started(whole: Resolved, ends: Sequence[int]) -> tuple[InProcessExecutor, Any]:
    layers, host = tuple(pairwise(ends)), InProcessExecutor(ProcessorClock())
    setup = replace(
        whole,
        layers=layers,
        hosts=whole.hosts * len(layers),
        devices=(whole.devices[0],) * (len(layers) + 1),
        threads=(1,) * (len(layers) + 1),
    )
    return host, host.begin(stage_plans(setup))


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    options = benchmark.parser(repeats=20).parse_args()
    figures = measured(options.repeats)
    benchmark.keep(figures, f"--repeats {options.repeats}")
    show(figures)
