"""The centralised executor, the first design of the report on vLLM (Zhao and Tong): the engine relays every hop.

      engine --batch--> stage 0 --batch--> engine --batch--> stage 1 --batch--> engine ...
             <-ready---         <-ready---        <-ready---         <-ready---

It shows what direct links between the stages buy. A stage knows nothing of it: both its neighbours have the engine's
address. A message goes on as the bytes that came; only its header is read. What stages send aside to a drafter stays
direct.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.cluster.timing import LinkTiming
from penstock.emulation.cluster import RealTimeExecutor, in_real_time
from penstock.emulation.stage import StageEmulation
from penstock.messages import Batch, Delivery, Frame, Message, Ready
from penstock.pipeline.base import StagePlan
from penstock.pipeline.processes import ProcessPipeline


class RelayExecutor(RealTimeExecutor):
    """Runs stages in processes as usual, except that every hop between two of them passes through the engine's."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> RelayPipeline:
        return RelayPipeline([in_real_time(plan) for plan in priced(plans)], self, name)


class RelayPipeline(ProcessPipeline):
    def _neighbours(self, index: int) -> tuple[str, str]:
        engine = self._executor.inbox.address
        return engine, engine

    def _on_message(self, delivery: Delivery, frames: Sequence[Frame]) -> bool:
        stage = receiver(delivery.message, self.stages)
        if stage is None:
            return super()._on_message(delivery, frames)
        self._inboxes[stage].send(*frames)
        return False


def receiver(message: Message, stages: int) -> int | None:
    """Index of the stage that a message is for; None where it is for the engine."""
    if isinstance(message, Batch):
        stage = len(message.spans)  # each stage that it has passed has added a span
    elif isinstance(message, Ready):
        stage = message.stage - 1
    else:
        return None
    return stage if 0 <= stage < stages else None


def priced(plans: Sequence[StagePlan]) -> list[StagePlan]:
    """The plans with modelled links: a hop between two stages takes two hops' time, to the engine and from it."""
    last = len(plans) - 1
    return [replace(plan, emulation=relayed(plan.emulation, i > 0, i < last)) for i, plan in enumerate(plans)]


def relayed(emulation: StageEmulation | None, upstream: bool, downstream: bool) -> StageEmulation | None:
    """The emulation of a stage with relayed neighbours upstream, downstream or on both sides."""
    if emulation is None:
        return None
    up = twice(emulation.up) if upstream else emulation.up
    return replace(emulation, up=up, down=twice(emulation.down) if downstream else emulation.down)


def twice(link: LinkTiming | None) -> LinkTiming | None:
    if link is None:
        return None
    return LinkTiming(2 * link.latency_s, link.bytes_per_s / 2, link.row_bytes)
