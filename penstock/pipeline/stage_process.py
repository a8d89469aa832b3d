"""A stage's process, which may serve one pipeline after another for as long as it lives."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.files import AUTO, EXACT
from penstock.pipeline.base import Launcher, StagePlan


@dataclass(eq=False)
class StageProcess:
    """A stage's process. Its ``launcher`` knows it by ``name``; ``plan`` says what it holds."""

    plan: StagePlan
    launcher: Launcher
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    address: str = ""
    """The address of its inbox; empty until it has started."""
    session: str = ""
    """The session in which it started last."""
    patience: float = 0.0
    """Seconds that it has to answer a call into another session: it may still be computing a batch."""
    distrusted: bool = False
    """Whether it was silent for too long, or broke the protocol."""
    reported: bool = False
    """Whether its end has been reported."""
    on_end: Callable[[str], None] | None = None
    """Called with the cause when it has ended."""

    @property
    def gone(self) -> bool:
        return self.reported or self.launcher.ended(self.name)

    def end(self, cause: str) -> None:
        """Note that it has ended."""
        self.reported = True
        if self.on_end is not None:
            self.on_end(cause)

    def holds(self, plan: StagePlan) -> bool:
        """Whether it has loaded what this plan needs, whatever its place in a pipeline was."""
        return held(self.plan) == held(plan)


def held(plan: StagePlan) -> StagePlan:
    """The part of a plan that cannot change once its layers are loaded.

    An engine asks for exact numerics only where it has them, so that a process loaded with "auto" computes the same.
    """
    numerics = AUTO if plan.numerics == EXACT else plan.numerics
    return replace(plan, numerics=numerics, threads=1, tap=None, emulation=None)


def take(processes: list[StageProcess], plan: StagePlan) -> StageProcess | None:
    """Remove and return a living process that holds what the plan needs; None if there is none."""
    found = next((one for one in processes if one.holds(plan) and not one.gone), None)
    if found is not None:
        processes.remove(found)
    return found


def living(processes: Iterable[StageProcess]) -> list[StageProcess]:
    return [one for one in processes if not one.gone]
