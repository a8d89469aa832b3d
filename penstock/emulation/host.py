"""Stage processes whose emulated devices keep their times at real-time priority, for benches."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.pipeline.plan import StagePlan
from penstock.pipeline.processes import ProcessHost, ProcessPipeline


class RealTimeHost(ProcessHost):
    """Stages that stand for devices come before what else runs on this host, if Linux lets them: see priority.py."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> ProcessPipeline:
        return super().begin([in_real_time(plan) for plan in plans], name)


def in_real_time(plan: StagePlan) -> StagePlan:
    """Real stages have no other times than their own, and stay as they are."""
    if plan.emulation is None:
        return plan
    return replace(plan, emulation=replace(plan.emulation, real_time=True))
