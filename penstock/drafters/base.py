"""What a drafter is: it proposes children for nodes of a request's tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.estimates.draft_timing import DraftTiming
from penstock.estimates.drafts import DraftQuality
from penstock.requests.request import Request
from penstock.tree import Node


@dataclass(frozen=True)
class DraftRequest:
    """Nodes of one request, parents first, for each of which ``count`` candidates are wanted.

    ``stream`` is the number of the last batch that has entered the target's stages.
    """

    request: Request
    nodes: Sequence[Node]
    count: int
    stream: int = 0
    corrects: bool = False
    """Whether a node that has been answered for may be answered for again, where the drafter knows better."""


class Draft(NamedTuple):
    """Candidates for one node, best first, as (token, log of the chance that the target picks it).

    None: the drafter cannot say yet, but may when the root has moved on, or the node has entered.
    """

    node: Node
    candidates: Sequence[tuple[int, float]] | None


class Drafter(Protocol):
    """Submit and poll, so that drafting never blocks the engine. One round of asks is under way at a time."""

    @property
    def reads_target(self) -> bool:
        """Whether it reads the target's states: asked again about a node it may know better than before."""
        ...

    @property
    def free(self) -> bool:
        """Whether it answers without taking a device's time, so that asking it in vain loses nothing."""
        ...

    @property
    def busy(self) -> bool:
        """Whether the last asks have not been answered."""
        ...

    @property
    def timing(self) -> DraftTiming:
        """What the last asks have cost so far; nothing where the answers are there at once."""
        ...

    def calibrate_by(self, quality: DraftQuality) -> None:
        """What the engine learns of drafts from now on. A drafter that calibrates its candidates itself does so by it,
        and says so in it (``DraftQuality.by_drafter``)."""
        ...

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        """Begin a round. Returns how many rows it takes, what the drafter lacks of the prompts included."""
        ...

    def poll(self) -> list[Draft]:
        """Answers that have arrived. Raises PipelineError if the drafter was lost."""
        ...

    @property
    def due(self) -> float | None:
        """The moment at which ``poll`` has something without any further message."""
        ...

    def prepare_grammar(self, request: Request) -> None:
        """The request, which has a grammar, has been admitted: get ready for it, and go on meanwhile."""
        ...

    def has_grammar(self, request: Request) -> bool:
        """Whether the drafter is ready for the request's grammar: now it can be asked without others waiting for it."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...

    def close(self) -> None: ...
