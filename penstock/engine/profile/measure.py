"""Measures a model's layers on a device: real stages there compute batches of several sizes and lengths of text.

A model is held as four stages, one after the other on the device: the first layer (with the embedding), the second, as
many of the rest as there is room for, and the last (with the head). The time of many layers less that of one gives the
time per layer; the rest of the one-layer stage's time is the overhead of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from penstock.cluster.measured import LayerTimes
from penstock.config import FieldError
from penstock.engine.profile.text import MeasuredText
from penstock.messages import Batch
from penstock.pipeline.base import Host, HostedPipeline
from penstock.pipeline.plan import StagePlan

ROWS: Final = (1, 4, 16, 64, 256)
CONTEXTS: Final = (0, 512, 2048)
CHUNK: Final = 256
"""Most tokens of a batch that only makes the text longer."""
FEW_ROWS: Final = 16
REPEATS: Final = 7
"""Measurements of a batch of few rows; the first one warms up and does not count."""
REPEATS_OF_MANY: Final = 3
LEAST_LAYERS: Final = 4

Layers = tuple[int, int]
OnStep = Callable[[int, int], None]
"""Called with the number of measurements that are done, and of all."""


def parts_of(layers: int, most: int) -> tuple[Layers, ...]:
    """The layers of the four stages, ``most`` at most for the third. Raises FieldError if the model has too few."""
    if layers < LEAST_LAYERS:
        raise FieldError("model", f"has {layers} layers; a profile takes {LEAST_LAYERS}: write its layer_split down")
    return (0, 1), (1, 2), (2, 2 + max(1, min(most, layers - 3))), (layers - 1, layers)


def contexts_within(longest: int) -> tuple[int, ...]:
    """The contexts that leave room for the largest batch within a text of ``longest`` tokens."""
    return tuple(context for context in CONTEXTS if not context or context + ROWS[-1] <= longest)


def measured_times(
    host: Host, plans: Sequence[StagePlan], contexts: Sequence[int], on_step: OnStep, tokens: Sequence[int] = ()
) -> LayerTimes:
    """Start the four stages, measure, and stop them. Raises PipelineError if one cannot start or is lost.

    ``tokens``: the text that is computed; empty for arbitrary tokens. The time of a mixture of experts depends on it.
    """
    pipeline = host.begin(plans, "profile")
    try:
        while not pipeline.joined():
            host.wait(pipeline.due)
        return times_of(Bench(host, pipeline), plans, contexts, on_step, MeasuredText(plans[0].vocab_size, tokens))
    finally:
        pipeline.close()


class Bench:
    """Stages that compute one batch at a time."""

    def __init__(self, host: Host, pipeline: HostedPipeline) -> None:
        self._host = host
        self._pipeline = pipeline

    def seconds(self, batch: Batch) -> list[float]:
        """Seconds that each stage computes for a batch."""
        self._until(lambda: self._pipeline.ready)
        self._pipeline.submit(batch)
        found = self._pipeline.poll()
        while not found:
            self._host.wait(self._pipeline.due)
            found = self._pipeline.poll()
        return [span.end - span.start for span in found[0].spans]

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._host.wait(self._pipeline.due)
            self._pipeline.poll()


def times_of(
    bench: Bench, plans: Sequence[StagePlan], contexts: Sequence[int], on_step: OnStep, text: MeasuredText
) -> LayerTimes:
    steps, done = len(contexts) * len(ROWS), 0
    grid: list[list[list[float]]] = [[] for _ in ROWS]
    for context in contexts:
        while text.tokens < context:
            bench.seconds(text.advance(min(CHUNK, context - text.tokens)))
        for i, rows in enumerate(ROWS):
            repeats = REPEATS if rows <= FEW_ROWS else REPEATS_OF_MANY
            taken = [bench.seconds(text.attempt(rows)) for _ in range(repeats)][1:]
            grid[i].append([1e3 * median(stage) for stage in zip(*taken, strict=True)])
            done += 1
            on_step(done, steps)
    return solved(grid, plans[2].last - plans[2].first, contexts)


def solved(grid: Sequence[Sequence[Sequence[float]]], many: int, contexts: Sequence[int]) -> LayerTimes:
    """Layer, stage and head times from milliseconds [rows][contexts][4 stages]; the third stage has ``many`` layers."""
    layer = tuple(tuple(layer_ms(stages[1], stages[2], many) for stages in line) for line in grid)
    beside = [
        [(one - each, last - one) for (_, one, _, last), each in zip(line, layers, strict=True)]
        for line, layers in zip(grid, layer, strict=True)
    ]
    return LayerTimes(
        rows=ROWS,
        contexts=tuple(contexts),
        layer_ms=layer,
        stage_ms=tuple(max(0.0, median(stage for stage, _ in line)) for line in beside),
        head_ms=tuple(max(0.0, median(head for _, head in line)) for line in beside),
    )


def layer_ms(one: float, many: float, layers: int) -> float:
    """Milliseconds of one layer, from those of a stage of one layer and of a stage of ``layers``."""
    # In a noisy measurement many layers may seem no slower than one: then their mean has to do.
    return (many - one) / (layers - 1) if layers > 1 and many > one else many / layers
