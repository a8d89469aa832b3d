"""The processes that may become a stage of another pipeline."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.pipeline.base import TapSpec
from penstock.pipeline.stage_process import StageProcess, take
from tests.agents import PLAN


class Nobody:
    """A launcher that has started nothing."""

    alive = True
    clock_offset = 0.0

    def __init__(self) -> None:
        self.ends: set[str] = set()

    def ended(self, process: str) -> bool:
        return process in self.ends

    def listen(self, process: str, pipe: int) -> None: ...

    def forget(self, process: str) -> None: ...

    def start(self, spec: object) -> None: ...

    def kill(self, process: str) -> None: ...


def test_who_holds_the_layers_may_be_any_stage_of_them() -> None:
    process = StageProcess(PLAN, Nobody())
    assert process.holds(replace(PLAN, threads=7, tap=TapSpec(layers=(1,), address="a", session="s")))


@pytest.mark.parametrize(
    "other",
    [{"first": 1, "last": 2}, {"model": "n"}, {"capacity": 2}, {"dtype": "float16"}, {"host": "b"}, {"device": "cuda"}],
)
def test_who_holds_anything_else_may_not(other: dict[str, object]) -> None:
    assert not StageProcess(PLAN, Nobody()).holds(replace(PLAN, **other))


def test_each_is_taken_once_and_none_that_has_ended() -> None:
    launcher = Nobody()
    gone, reported, one = (StageProcess(PLAN, launcher) for _ in range(3))
    launcher.ends.add(gone.name)
    reported.end("killed")
    there = [gone, reported, one]
    assert take(there, replace(PLAN, model="n")) is None
    assert take(there, PLAN) is one
    assert take(there, PLAN) is None


def test_who_waits_for_its_end_is_told() -> None:
    told: list[str] = []
    process = StageProcess(PLAN, Nobody(), on_end=told.append)
    process.end("killed")
    assert told == ["killed"]
    assert process.gone
