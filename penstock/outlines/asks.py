"""What is asked of the target at a time, on the way to an answer in points."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from penstock.core import OutlineOutput, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Ask:
    """A request. ``pinned`` of its prompt's tokens are the same for every question."""

    name: str
    prompt: dict[str, Any]
    params: SamplingParams
    pinned: int = 0


@dataclass(frozen=True)
class Step:
    """Requests that run at the same time. Those of the ``last`` step are the answer, each after its heading."""

    asks: list[Ask]
    report: OutlineOutput
    last: bool = False
    headings: list[str] = field(default_factory=list)


Steps = Generator[Step, list[RequestOutput], None]
"""Send what became of a step's requests, in their order, for the next one; nothing follows the last one."""
