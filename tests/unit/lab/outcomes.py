"""Made-up outcomes of requests, with round times."""

from __future__ import annotations

from penstock.clients.api import Chunk, Usage
from penstock.lab.serving_load import Level, Outcome


def answered(
    index: int = 0,
    started: float = 0.0,
    first: float = 1.0,
    gap: float = 0.5,
    chunks: int = 3,
    usage: Usage | None = Usage(10, 5),  # noqa: B008  (it is frozen)
    text: str = "x",
) -> Outcome:
    """``chunks`` with text, the first one ``first`` after the start and ``gap`` between them; half a gap to the end."""
    outcome = Outcome(index, started)
    for i in range(chunks):
        outcome.add(Chunk(text), started + first + i * gap)
    outcome.add(Chunk(finish_reason="length"), started + first + (chunks - 0.5) * gap)
    outcome.add(Chunk(usage=usage), started + 99)
    return outcome


def failed(index: int = 0, kind: str = "HTTP 429") -> Outcome:
    return Outcome(index, 0.0, error=kind, message=f"{kind}: too many")


def level(*outcomes: Outcome, concurrency: int | None = 1, asked: int | None = None, seconds: float = 10.0) -> Level:
    return Level(concurrency, len(outcomes) if asked is None else asked, 0.0, seconds, list(outcomes))
