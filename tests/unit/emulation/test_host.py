"""The stages that a bench gives priority on this host."""

from __future__ import annotations

from penstock.cluster.timing import LinkTiming
from penstock.emulation.cluster import in_real_time
from penstock.emulation.stage import StageEmulation
from penstock.pipeline.base import StagePlan


def plan(emulation: StageEmulation | None) -> StagePlan:
    return StagePlan(
        model="m",
        first=0,
        last=1,
        capacity=8,
        dtype="float32",
        device="cpu",
        max_model_len=8,
        vocab_size=8,
        emulation=emulation,
    )


def test_what_stands_for_a_device_keeps_its_time_and_what_is_real_does_not() -> None:
    assert in_real_time(plan(None)) == plan(None)
    link = LinkTiming(1.0, 2.0, 3.0)
    assert not StageEmulation(up=link).real_time
    assert in_real_time(plan(StageEmulation(up=link))) == plan(StageEmulation(up=link, real_time=True))
