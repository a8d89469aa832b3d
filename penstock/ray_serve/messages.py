"""The messages between the ingress and a replica. Ray carries them; both ends are Penstock's own processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from penstock.core import SamplingParams, SpeculationMetrics
from penstock.engine.completion import CompletionDelta

BEGUN: Final = 2**20
"""Taken off the priority of an answer that goes on: whoever reads it has waited once, and reads nothing meanwhile."""


@dataclass(frozen=True)
class RemoteCall:
    """A request as the ingress sends it, for the first time or to go on with ``came`` after a replica was lost."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    """The parameters, with the seed that the ingress has drawn where the request samples."""
    came: list[list[int]] = field(default_factory=list)
    """Token ids that have come for each of the ``n`` completions; the list is empty for a new request."""
    priority: int = 0
    client: str = ""

    def going_on(self, came: list[list[int]]) -> RemoteCall:
        """The same request after these tokens, ahead of requests that have none."""
        begun = any(came) and not self.came
        return replace(self, came=came if any(came) else [], priority=self.priority - BEGUN * begun)


@dataclass(frozen=True)
class Accepted:
    """The first message of an answer: the request was checked and is queued.

    ``texts`` are those of the tokens with which each completion begins, ``numerics`` the engine's.
    """

    texts: list[str]
    numerics: str


@dataclass(frozen=True)
class Ended:
    """Figures of a completion that has ended."""

    metrics: SpeculationMetrics
    seconds: float | None
    speed_up: float | None


@dataclass(frozen=True)
class News:
    """New output; one without ``deltas`` says that the engine has admitted the request."""

    deltas: list[CompletionDelta]
    cached: int
    """Prompt tokens that the replica's prefix cache had."""
    ended: dict[int, Ended] = field(default_factory=dict)
    """Figures of the completions that end with these deltas, by index."""


@dataclass(frozen=True)
class Refused:
    """The request is at fault; another replica would say the same. ``message`` names the field."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The replica's engine has ended: another replica can go on."""

    message: str


Message = Accepted | News | Refused | Failed
