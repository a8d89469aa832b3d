"""The script of a simulation: the target's tokens, and the drafter's candidates for each, fixed beforehand.

Token ids are ranks: candidate k of every node is token k, best first. The target's token after a node on its path is
therefore the rank that the drafter gives it there, or ``MISSED``. A script is the same for every strategy.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from penstock.drafters.base import CONCENTRATION, FLOOR, confidence
from penstock.lab.recording import NO_TOKEN, Recording

MISSED = 1 << 20
"""The target's token where none of the drafter's candidates carries it."""
PROFILE_POOL = 4096
"""Number of different confidences that a profile is drawn as."""
DEMO_ACCURACY: Final = (
    *(0.732, 0.8721, 0.9171, 0.939, 0.956, 0.9663, 0.9731, 0.9779),
    *(0.9814, 0.9841, 0.9861, 0.9878, 0.9892, 0.9903, 0.9912, 0.992),
)
"""The demo pair's at T = 1: its model card has those of 1, 4 and 16 candidates; between them the misses are assumed to
fall as a power of the number of candidates."""


@dataclass(frozen=True)
class Script:
    """``picks[r][i]`` is request r's token i after the prompt; ``drafts[r][i]`` an index into ``pool`` for its draft.

    ``prompts[r]`` is the number of tokens of request r's prompt. ``pool`` holds lists of log chances, best first: the
    drafter's candidates of one node. Off the target's path a node's draft is any of the pool's, chosen by a hash of its
    path: drafts there are modelled like those on the path, none of which the target follows.
    """

    prompts: tuple[int, ...]
    picks: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    pool: tuple[tuple[float, ...], ...]
    label: str
    block: int = 1
    """Levels that one pass of the drafter drafts, each of which is a row; 1: a pass for every level."""

    @property
    def tokens(self) -> int:
        return sum(len(picks) for picks in self.picks)

    def with_again(self, request: int, tokens: int) -> Script:
        """The script with a further request: the first ``tokens`` tokens of this one."""
        prompts = (*self.prompts, self.prompts[request])
        picks, drafts = ((*lists, lists[request][:tokens]) for lists in (self.picks, self.drafts))
        return replace(self, prompts=prompts, picks=picks, drafts=drafts)

    def with_prompt(self, request: int, tokens: int) -> Script:
        """The script with a prompt of ``tokens`` tokens for this request."""
        return replace(self, prompts=(*self.prompts[:request], tokens, *self.prompts[request + 1 :]))

    def after(self, request: int, position: int) -> int:
        """The target's token after ``position`` of a request's path; any token after its last one."""
        # The next token is at position + 1, and picks begin after the prompt.
        i = position + 1 - self.prompts[request]
        picks = self.picks[request]
        return picks[i] if 0 <= i < len(picks) else MISSED


def profile_script(
    accuracy: Sequence[float],
    requests: int,
    tokens: int,
    seed: int,
    prompt: int = 32,
    concentration: float = CONCENTRATION,
) -> Script:
    """A script drawn from an accuracy profile (cumulative, like ``synthetic``'s); calibrated, with
    varying confidence."""
    rng = random.Random(seed)
    pool = [confidence(accuracy, rng, concentration) for _ in range(PROFILE_POOL)]
    sums = [list(accumulate(chances)) for chances in pool]
    picks, drafts = [], []
    for _ in range(requests):
        drafted = [rng.randrange(PROFILE_POOL) for _ in range(tokens)]
        ranks = [bisect_right(sums[i], rng.random()) for i in drafted]
        picks.append(tuple(rank if rank < len(accuracy) else MISSED for rank in ranks))
        drafts.append(tuple(drafted))
    logs = tuple(tuple(math.log(max(p, FLOOR)) for p in chances) for chances in pool)
    label = f"profile {', '.join(f'{a:g}' for a in accuracy)}"
    return Script((prompt,) * requests, tuple(picks), tuple(drafts), logs, label)


def recording_script(chosen: Sequence[tuple[Recording, int]], tokens: int, label: str) -> Script:
    """A script of the first ``tokens`` tokens of these requests, as recorded; each is (recording, its request).

    On the path the candidates have their recorded chances, and the target's token its rank among them. Off the path a
    node's draft is that of any of these tokens.
    """
    picks: list[tuple[int, ...]] = []
    drafts: list[tuple[int, ...]] = []
    pool: list[tuple[float, ...]] = []
    for recording, request in chosen:
        first = recording.rows(request).start
        rows = range(first, min(first + tokens, recording.rows(request).stop))
        picks.append(tuple(rank_of(int(recording.tokens[row]), recording.candidates[row].tolist()) for row in rows))
        drafts.append(tuple(range(len(pool), len(pool) + len(rows))))
        pool += [chances_of(recording, row) for row in rows]
    prompts = tuple(int(recording.prompt_lengths[request]) for recording, request in chosen)
    return Script(prompts, tuple(picks), tuple(drafts), tuple(pool), label)


def rank_of(token: int, candidates: Sequence[int]) -> int:
    return candidates.index(token) if token in candidates else MISSED


def chances_of(recording: Recording, row: int) -> tuple[float, ...]:
    """Log chances of a row's candidates, without the padding after them."""
    count = int((recording.candidates[row] != NO_TOKEN).sum())
    return tuple(recording.chances[row, :count].tolist())
