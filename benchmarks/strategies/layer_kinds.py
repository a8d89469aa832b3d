"""Layers that differ: plans by kind of layer beside plans by the mean of all, in processor time of real stages.

    python -m benchmarks.strategies.layer_kinds [--repeats N]

Random checkpoints: hybrids of Qwen3.5's pattern, three gated delta nets and one layer that attends, and of
Nemotron-H's, whose layers are a mixer, attention or a feed-forward network alone; and a mixture of experts whose first
layers are dense, as DeepSeek's. A profile is taken as ``penstock profile`` takes it, except that stages run in this
process, on one thread, and a stage's time is the processor time that it takes: other work on the host counts less. The
layers are then split over stages on equal devices such that the slowest stage is as fast as it can be, by the kinds'
times and by their mean. All splits are loaded and compute the same batches in turn; the profile's prediction of every
stage is compared with what the stage takes.

Kinds of layers differ by the weights that they read, so that a small model, whose layers take what their calls take,
shows nothing. Widths here stand to the hidden size of 1024 as they do in the models that are named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
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
    in_parts,
    measured_times,
)
from penstock.engine.resolve import Resolved
from penstock.hosts.placement import HERE
from penstock.pipeline.engine_end import InProcessExecutor
from penstock.planner.costs import Batch, problem_of
from penstock.planner.partition import least_slowest
from tests.checkpoints import make_checkpoint

NAME, HOW = "layer_kinds", "Measured, random weights, processor time of one thread"
STAGES: Final = (3, 5)
ROWS: Final = (1, 16)
CONTEXT: Final = 2048
LENGTH: Final = CONTEXT + 256
SIZES: Final[dict[str, Any]] = {
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
HYBRID: Final[dict[str, Any]] = {
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
}
"""Qwen3.5-0.8B, with feed-forward networks of 2048 in place of 3584."""
NEMOTRON: Final[dict[str, Any]] = {
    "num_hidden_layers": 16,
    "intermediate_size": 5376,
    "layers_block_type": [*(["linear_attention", "mlp"] * 3), "full_attention", "mlp"] * 2,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
}
"""Nemotron-H-8B at a quarter of its widths."""
MIXTURE: Final[dict[str, Any]] = {
    "num_hidden_layers": 12,
    "intermediate_size": 1280,
    "first_k_dense_replace": 3,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
"""A dense layer is as wide as the experts of a token together, as in DeepSeek-V3."""
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Qwen3.5's pattern": ("qwen3_5", SIZES | HYBRID),
    "Nemotron-H's pattern": ("nemotron_h", SIZES | NEMOTRON),
    "three dense layers, then experts": ("glm4_moe", SIZES | MIXTURE),
}


Split = tuple[int, ...]
"""Layers of each stage."""
Taken = dict[tuple[Split, int], list[float]]
"""Milliseconds of each stage, by split and rows."""


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
    """The times of the model's kinds, both plans for each number of stages and rows, and how far stages are missed."""
    architecture, sizes = MODELS[name]
    with TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), architecture, **sizes)
        options = EngineOptions(
            model=folder, max_model_len=LENGTH, threads=1, quantization="none", speculative_config=None
        )
        found = candidates_on(options, [HERE], {})
        (candidate,), price = found.devices.values(), found.price
        times = profile_of(candidate, price)
        plans = [planned(price, times, stages, rows) for stages in STAGES for rows in ROWS]
        splits = {tuple(split) for plan in plans for split in plan["layers"].values()}
        taken = taken_ms(candidate.setup, splits, repeats)
    missed = errors(price, times, taken)
    yield {
        "model": name,
        "kinds": list(price.counts(price.all_layers)),
        **kinds_ms(times),
        "error": {"stages": len(missed), "median": median(missed), "worst": max(missed)},
    }
    for plan in plans:
        yield {"model": name, **plan, **compared(plan, taken)}


def profile_of(candidate: Candidate, price: ModelPrice) -> LayerTimes:
    plans, host = stage_plans(in_parts(candidate)), InProcessExecutor(ProcessorClock())
    return measured_times(host, plans, price.layer_kinds, (0, CONTEXT), lambda done, steps: None)


def kinds_ms(times: LayerTimes) -> dict[str, Any]:
    """Milliseconds of a layer of each kind, and of the mean, by rows behind CONTEXT tokens."""
    at = times.contexts.index(CONTEXT)
    return {
        "ms": {rows: [grid[times.rows.index(rows)][at] for grid in (*times.kind_ms, times.layer_ms)] for rows in ROWS}
    }


def planned(price: ModelPrice, times: LayerTimes, stages: int, rows: int) -> dict[str, Any]:
    """Layers by stage, and predicted milliseconds of the slowest stage, of both plans."""
    alike = replace(price, kinds=(), pattern=()), replace(times, kind_ms=())
    splits = {"kinds": split_of(price, times, stages, rows), "mean": split_of(*alike, stages, rows)}
    slowest = {way: max(predicted_ms(price, times, layers, rows)) for way, layers in splits.items()}
    return {"stages": stages, "rows": rows, "layers": splits, "predicted_ms": slowest}


def predicted_ms(price: ModelPrice, times: LayerTimes, layers: Sequence[int], rows: int) -> list[float]:
    """Milliseconds of each stage."""
    problem = problem_of(*cluster_of(price, times, len(layers), rows))
    return [1e3 * float(problem.stage_s[0, first, last]) for first, last in bounds(layers)]


def bounds(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage, and that behind its last."""
    return [*pairwise([0, *accumulate(layers)])]


def errors(price: ModelPrice, times: LayerTimes, taken: Taken) -> list[float]:
    """|predicted / taken - 1| of every stage of every split, with each number of rows."""
    return [
        abs(predicted / stage - 1)
        for (layers, rows), stages in taken.items()
        for predicted, stage in zip(predicted_ms(price, times, layers, rows), stages, strict=True)
    ]


def compared(plan: dict[str, Any], taken: Taken) -> dict[str, Any]:
    """Milliseconds of both plans' stages, and how many times as fast the slowest is; empty if they are alike."""
    layers = plan["layers"]
    if layers["kinds"] == layers["mean"]:
        return {}
    found = {way: taken[tuple(split), plan["rows"]] for way, split in layers.items()}
    return {"taken_ms": found, "ratio": max(found["mean"]) / max(found["kinds"])}


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


def taken_ms(whole: Resolved, splits: set[Split], repeats: int) -> Taken:
    """Milliseconds of processor time, the median of ``repeats``, of each stage; the splits compute in turn."""
    benches = {
        split: (Bench(*started(whole, split)), MeasuredText(whole.checkpoint.vocab_size)) for split in sorted(splits)
    }
    for bench, text in benches.values():
        while text.tokens < CONTEXT:
            bench.seconds(text.advance(CHUNK))
    found: Taken = {}
    for rows in ROWS:
        taken: dict[Split, list[list[float]]] = {split: [] for split in benches}
        for i in range(repeats + 1):
            for split, (bench, text) in benches.items():
                seconds = bench.seconds(text.attempt(rows))
                if i:  # the first one warms up
                    taken[split].append(seconds)
        for split, each in taken.items():
            found[split, rows] = [1e3 * median(stage) for stage in zip(*each, strict=True)]
    return found


def started(whole: Resolved, split: Split) -> tuple[InProcessExecutor, Any]:
    host, stages = InProcessExecutor(ProcessorClock()), len(split)
    setup = replace(
        whole,
        layers=tuple(bounds(split)),
        hosts=whole.hosts * stages,
        devices=(whole.devices[0],) * (stages + 1),
        threads=(1,) * (stages + 1),
    )
    return host, host.begin(stage_plans(setup), "measured")


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    options = benchmark.parser(repeats=20).parse_args()
    figures = measured(options.repeats)
    benchmark.keep(figures, f"--repeats {options.repeats}")
    show(figures)
