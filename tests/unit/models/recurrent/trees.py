"""Random histories of two requests as a stage sees them: drafts, commits, misses, prunes, slots that come back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows, Sampling
from penstock.stage.visibility import BatchView, Visibility

CAPACITY = 320


@dataclass
class _Request:
    number: int
    committed: list[int] = field(default_factory=list)
    announced: int = 0
    tree: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Drafted rows: slot -> (parent slot, position)."""


def histories(seed: int, steps: int, shares: bool = True) -> Iterator[BatchView]:
    """Batches of two requests and, where some share, of a third that begins with what the first has by then."""
    rng = random.Random(seed)
    visibility = Visibility(CAPACITY)
    free = list(range(CAPACITY))
    rng.shuffle(free)
    requests = [_Request(0), _Request(1)]
    for stream in range(steps):
        batch = Batch(stream=stream, rows=Rows())
        if stream == 0 or (shares and stream == steps // 2):
            opened = requests if stream == 0 else [_Request(2, list(requests[0].committed))]
            batch.opened = [Opened(one.number, Sampling()) for one in opened]
            requests = [*requests, *opened] if stream else requests
        for request in requests:
            _grow(request, batch, free, rng)
            new = request.committed[request.announced :]
            if new:
                batch.committed.append(CommittedSlots(request.number, new))
                request.announced = len(request.committed)
        batch.alive = list(range(len(batch.rows)))
        visibility.apply_header(batch)
        if batch.alive:
            yield visibility.view(batch, batch.alive)


def _grow(request: _Request, batch: Batch, free: list[int], rng: random.Random) -> None:
    """A chunk of the text, a commit with all that dies of it, or some more drafts."""
    what = rng.choice(["chunk", "commit", "draft", "draft"])
    if what == "chunk" and not request.tree and len(free) > 150:
        for _ in range(rng.choice([1, 5, 40])):
            slot, position = free.pop(), len(request.committed)
            above = request.committed[-1] if request.committed else NO_SLOT
            batch.rows.append(request.number, 0, slot, above, position, 0)
            request.committed.append(slot)
    elif what == "commit" and request.tree:
        children = [slot for slot, (_, at) in request.tree.items() if at == len(request.committed)]
        hit = rng.choice([*children, None])
        if hit is not None:
            request.committed.append(hit)
            del request.tree[hit]
        alive = set(request.committed[-1:]) if hit is not None else set()
        for slot, (parent, _) in list(request.tree.items()):  # parents first
            if parent in alive:
                alive.add(slot)
            else:
                del request.tree[slot]
                free.append(slot)
    elif what == "draft" and request.committed and len(free) > 60:
        for _ in range(rng.choice([1, 3, 12])):
            parent = rng.choice([request.committed[-1], *request.tree])
            at = request.tree[parent][1] + 1 if parent in request.tree else len(request.committed)
            slot = free.pop()
            request.tree[slot] = parent, at
            batch.rows.append(request.number, 0, slot, parent, at, 0)
