"""The time of a look-up of method ``ngram`` by the length of the text: milliseconds of one core.

    python -m benchmarks.costs.lookup

Random text over a small vocabulary, so that runs come again and have several followers. A question is about 8 nodes
that lie up to 8 tokens below the root; between two of them a token is committed. The first question also takes in the
whole prompt. The median, and the 95th percentile in brackets, of 300 questions.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from benchmarks.shared.benchmark import show
from benchmarks.shared.outputs import Deaf
from penstock.drafters.base import DraftRequest
from penstock.drafters.merged import NgramDrafter, NgramOptions
from penstock.messages import Sampling
from penstock.requests.request import Nodes, Request
from penstock.requests.slots import SlotPool
from penstock.strategies.base import Autoregressive
from penstock.tree import Node

NAME = "lookup"
HOW = "Measured, without a model"
LENGTHS = (1_000, 8_000, 32_000)
QUESTIONS = 300
DEPTH = 8
VOCABULARY = 500
COUNT = 8
"""Candidates asked for."""


def measured() -> list[dict[str, Any]]:
    """Milliseconds of the first question, and median and 95th percentile of later ones, by length of the text."""
    return [asked(length) for length in LENGTHS]


def asked(length: int) -> dict[str, Any]:
    rng = random.Random(0)
    request = a_request([rng.randrange(VOCABULARY) for _ in range(length)])
    usual = NgramOptions()
    drafter = NgramDrafter(usual.prompt_lookup_max, usual.prompt_lookup_min)
    times = []
    for _ in range(1 + QUESTIONS):
        question = DraftRequest(request, chain(request, rng), COUNT)
        started = time.thread_time()
        drafter.ask([question])
        times.append(1e3 * (time.thread_time() - started))
        drafter.poll()
        token = next(iter(request.tree.root.children))
        hit, _ = request.tree.commit(token)
        assert hit is not None
        request.committed.append(hit)
    first, *later = times
    later.sort()
    return {"length": length, "first_ms": first, "ms": statistics.median(later), "p95_ms": later[19 * QUESTIONS // 20]}


def a_request(prompt: list[int]) -> Request:
    slots = len(prompt) + QUESTIONS * (DEPTH + 1) + 1
    request = Request(0, prompt, Sampling(), QUESTIONS + 1, frozenset(), Autoregressive(), Deaf())
    request.take_prefill_chunk(Nodes(SlotPool(slots, slots)), len(prompt))
    return request


def chain(request: Request, rng: random.Random) -> list[Node]:
    """A chain of nodes, beginning with the root's child."""
    nodes, parent = [], request.tree.root
    for _ in range(DEPTH):
        parent = next(iter(parent.children.values()), None) or request.tree.extend(
            parent, rng.randrange(VOCABULARY), -0.1
        )
        nodes.append(parent)
    return nodes


if __name__ == "__main__":
    show(measured())
