"""The requests of one step on the way to an answer in points."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from penstock.core import OutlineOutput, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Ask:
    """A request to the target. The first ``pinned`` tokens of its prompt are the same for every question."""

    name: str
    prompt: dict[str, Any]
    params: SamplingParams
    pinned: int = 0


@dataclass(frozen=True)
class Step:
    """Requests that run at the same time. Those of the ``last`` step make up the answer, each after its heading."""

    asks: list[Ask]
    report: OutlineOutput
    last: bool = False
    headings: list[str] = field(default_factory=list)


Steps = Generator[Step, list[RequestOutput], None]
"""Steps of an answer; each step's outputs are sent back, in the order of its requests, to get the next step."""
