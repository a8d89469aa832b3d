"""The interface of drafters, which propose children for nodes of a request's tree."""

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

    ``stream`` is the stream number of the last batch that has entered the target's stages.
    """

    request: Request
    nodes: Sequence[Node]
    count: int
    stream: int = 0
    corrects: bool = False
    """Whether the drafter may also correct its earlier answers for other nodes, where it knows better by now."""


class Draft(NamedTuple):
    """Candidates for one node, best first, as (token, log of the chance that the target picks it).

    None if the drafter cannot answer yet, but may be able to once the root has moved or the node has entered.
    """

    node: Node
    candidates: Sequence[tuple[int, float]] | None


class Drafter(Protocol):
    """Answers asynchronously (``ask``, then ``poll``), so that drafting never blocks the engine. One
    round at a time."""

    @property
    def reads_target(self) -> bool:
        """Whether it reads the target's states, so that it may know more about a node when asked again."""
        ...

    @property
    def free(self) -> bool:
        """Whether it answers without taking a device's time, so that asking in vain loses nothing."""
        ...

    @property
    def busy(self) -> bool:
        """Whether the last round has not been answered completely."""
        ...

    @property
    def timing(self) -> DraftTiming:
        """Time that the last round has taken so far, by cause; all zero where answers are immediate."""
        ...

    def calibrate_by(self, quality: DraftQuality) -> None:
        """Use ``quality`` as the engine's record of drafts from now on. A drafter that calibrates its candidates itself
        does so in this record, and sets ``DraftQuality.by_drafter``."""
        ...

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        """Begin a round. Returns the number of rows that it takes, including parts of prompts that the
        drafter lacks."""
        ...

    def poll(self) -> list[Draft]:
        """Answers that have arrived. Raises PipelineError if the drafter was lost."""
        ...

    @property
    def due(self) -> float | None:
        """Time at which ``poll`` will return something without a further message; None if there is no such time."""
        ...

    def prepare_grammar(self, request: Request) -> None:
        """Begin to compile the grammar of an admitted request, without blocking."""
        ...

    def has_grammar(self, request: Request) -> bool:
        """Whether the request's grammar is ready, so that nobody waits when the drafter is asked about it."""
        ...

    def forget(self, request: Request) -> None:
        """Drop everything about a request that has ended."""
        ...

    def close(self) -> None: ...
