"""The process of a stage, which may serve one pipeline after another for as long as it lives."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.pipeline.launching import Launcher
from penstock.pipeline.plan import StagePlan


@dataclass(eq=False)
class StageProcess:
    """Known to its ``launcher`` by its ``name``. ``plan`` says what it holds."""

    plan: StagePlan
    launcher: Launcher
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    address: str = ""
    """Of its inbox; empty before it has started."""
    session: str = ""
    """The latest one in which it has started."""
    patience: float = 0.0
    """Seconds within which it has to answer who calls it into another session: it may compute a batch by then."""
    distrusted: bool = False
    """Whether it has said nothing for too long, or what it should not have."""
    reported: bool = False
    """Whether its end has been reported."""
    on_end: Callable[[str], None] | None = None
    """Told why it has ended."""

    @property
    def gone(self) -> bool:
        return self.reported or self.launcher.ended(self.name)

    def end(self, cause: str) -> None:
        """It has ended."""
        self.reported = True
        if self.on_end is not None:
            self.on_end(cause)

    def holds(self, plan: StagePlan) -> bool:
        """Whether it has loaded what this plan asks for, wherever it was in its pipeline."""
        return held(self.plan) == held(plan)


def held(plan: StagePlan) -> StagePlan:
    """What of a plan is settled once its layers are loaded."""
    return replace(plan, threads=1, tap=None, emulation=None)


def take(processes: list[StageProcess], plan: StagePlan) -> StageProcess | None:
    """One of them that holds what the plan asks for, which is then none of them any more."""
    found = next((one for one in processes if one.holds(plan) and not one.gone), None)
    if found is not None:
        processes.remove(found)
    return found


def living(processes: Iterable[StageProcess]) -> list[StageProcess]:
    return [one for one in processes if not one.gone]
