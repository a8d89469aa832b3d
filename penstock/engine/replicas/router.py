"""Chooses the replica for a request: the one that has the fewest rows to compute before the answer is there.

A row is one token's way through the pipeline, of a prompt or an answer. A replica that already holds the beginning of a
prompt in its prefix cache has fewer rows of it to compute; one that is busy has those of others to compute first.
Both are counted in rows, so that a popular beginning spreads over replicas as soon as the queue before the one that
holds it is longer than computing it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

USUAL_ANSWER: Final = 128.0
"""Tokens that an answer is assumed to have before any has ended: a short paragraph or two."""
NEWEST: Final = 0.05
"""Weight (0 to 1) of the newest answer in the mean of their lengths: about the last 20 count."""


@dataclass(frozen=True)
class Load:
    """The work of one replica, and the part of one prompt that it need not compute."""

    cached: int
    """Number of the prompt's first tokens that its prefix cache holds."""
    backlog: int
    """Prompt tokens of its requests that are still to be computed."""
    running: int
    """Requests on it, those that wait among them."""


def cost(prompt_tokens: int, load: Load, answer_tokens: float) -> float:
    """Rows that a replica computes until the prompt is computed, and beside it for the answers under way.

    ``answer_tokens``: tokens that each request under way is expected to produce yet.
    """
    return prompt_tokens - load.cached + load.backlog + answer_tokens * load.running


def choose(prompt_tokens: int, loads: Sequence[Load], answer_tokens: float) -> int:
    """The place of the replica of the least cost; among equals of that with the fewest requests, then of the first."""
    return min(
        range(len(loads)),
        key=lambda place: (cost(prompt_tokens, loads[place], answer_tokens), loads[place].running, place),
    )


def reason(loads: Sequence[Load], chosen: int) -> str:
    """ "prefix" where the chosen replica holds more of the prompt than some other one does, else "load"."""
    return "prefix" if loads[chosen].cached > min(load.cached for load in loads) else "load"


def expected_answer(before: float, tokens: int) -> float:
    """The mean length of answers, in tokens, after one more has ended."""
    return before + NEWEST * (tokens - before)
