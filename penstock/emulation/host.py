"""Stage processes that keep their modelled times at real-time priority, for benches."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.pipeline.plan import StagePlan
from penstock.pipeline.processes import ProcessHost, ProcessPipeline


class RealTimeHost(ProcessHost):
    """Starts emulated stages ahead of everything else on this host, where Linux permits it: see priority.py."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> ProcessPipeline:
        return super().begin([in_real_time(plan) for plan in plans], name)


def in_real_time(plan: StagePlan) -> StagePlan:
    """The plan with real-time priority if its stage is emulated; a real stage has no modelled times to keep."""
    if plan.emulation is None:
        return plan
    return replace(plan, emulation=replace(plan.emulation, real_time=True))
