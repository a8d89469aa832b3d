"""Accepted tokens per millisecond of drafter time: the demo target's drafters beside its small draft model.

    python -m benchmarks.papers.drafter_time --eagle3 DIR --medusa DIR --spd DIR --early-exit DIR \\
        [--prompts 10] [--tokens 64]

`pipedec` as a chain (W = 1) and with four branches of four children (W = 4) over the four stages of the preset spd-4,
in virtual time; but what the drafter computes counts with the processor time that it takes here, its prompts included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.shared import virtual
from penstock import LLM
from penstock.lab.bench.comparison import decode
from penstock.messages import Batch
from penstock.pipeline.base import StagePlan, VirtualClock
from penstock.pipeline.engine_end import InProcessExecutor, InProcessPipeline
from penstock.speculation import parse_speculative
from penstock.stage.driver import Core

NAME = "drafter_time"
HOW = "Measured, the demo target's drafters on one core"
METHODS = ("eagle", "eagle3", "medusa", "spd", "early_exit")
CLUSTER = "spd-4"
WIDTHS = (1, 4)


class Stopwatch:
    """A drafter's core that keeps the processor time of its passes.

    ``taken`` has an entry for each: the number of rows that were asked about, and the seconds.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.taken: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def process(self, batch: Batch, hidden: Any) -> Any:
        started = time.thread_time()
        found = self._core.process(batch, hidden)
        self.taken.append((len(batch.wanted), time.thread_time() - started))
        return found


class TimedExecutor(InProcessExecutor):
    """Times every pipeline except the target's."""

    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self.watches: list[Stopwatch] = []

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> InProcessPipeline:
        pipeline = super().begin(plans, name)
        if name != "stage":
            for driver in pipeline.drivers:
                driver.core = watch = Stopwatch(driver.core)
                self.watches.append(watch)
        return pipeline


def measured(drafter: Mapping[str, Any], sizes: virtual.Sizes) -> dict[str, Any]:
    """Figures by width and temperature."""
    torch.set_num_threads(1)
    return {"method": drafter["method"], "widths": {f"W={width}": timed(drafter, width, sizes) for width in WIDTHS}}


def timed(drafter: Mapping[str, Any], width: int, sizes: virtual.Sizes) -> dict[str, Any]:
    """Accepted tokens, the drafter's passes and their milliseconds, by temperature."""
    config = parse_speculative({**drafter, "strategy": "pipedec", "width": width, "children": width})
    found, host = {}, TimedExecutor()
    with LLM(host=host, cluster=CLUSTER, speculative_config=config, enable_prefix_caching=False) as llm:
        (watch,) = host.watches
        for temperature in (0.0, 1.0):
            questions = virtual.asked(sizes, (temperature,))
            first = questions[0]  # decoded twice, since a process's first passes are slower
            decode(llm, [first.prompt], [first.params], config)
            watch.taken.clear()
            outputs = [decode(llm, [one.prompt], [one.params], config)[0].outputs[0] for one in questions]
            found[f"T={temperature:g}"] = {
                "accepted": sum(output.metrics.accepted for output in outputs),
                "passes": len(watch.taken),
                "ms": 1e3 * sum(seconds for _, seconds in watch.taken),
            }
    return found


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    drafters = {"draft_model": {"method": "draft_model", "model": "demo"}}
    for method, folders in wanted.drafters.items():
        drafters |= {f"{method} {virtual.as_stored(one)}": {"method": method, "model": one} for one in folders}
    for key, drafter in drafters.items():
        yield key, partial(measured, drafter, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, METHODS, HOW)
