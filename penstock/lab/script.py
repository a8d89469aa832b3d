"""The script of a simulation: the target's tokens, and the drafter's candidates for each of them, fixed beforehand.

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
from penstock.lab.record import NO_TOKEN, Recording

MISSED = 1 << 20
"""The target's token where it is none of the drafter's candidates: an id beyond all ranks."""
PROFILE_POOL = 4096
"""Number of different confidences that are drawn from a profile. All are drawn before the first step; fewer would come
again more often."""
MOST_TOKENS: Final = 10_000_000
"""Most tokens of a strategy, which are all drawn before any is simulated."""
DEMO_ACCURACY: Final = (
    *(0.732, 0.8721, 0.9171, 0.939, 0.956, 0.9663, 0.9731, 0.9779),
    *(0.9814, 0.9841, 0.9861, 0.9878, 0.9892, 0.9903, 0.9912, 0.992),
)
"""The demo pair's at T = 1: its model card has those of 1, 4 and 16 candidates; between them the misses are assumed to
fall as a power of the number of candidates."""


@dataclass(frozen=True)
class DistantDrafts:
    """Drafts for tokens that have one or more tokens between them and the last one that the drafter was shown.

    ``drafts[r][i]``: the index in ``pool`` of the draft of request r's token i. ``ranks[r][i]``: the rank of that token
    among the draft's candidates, or ``MISSED``. ``pool`` is as a ``Script``'s.
    """

    drafts: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    pool: tuple[tuple[float, ...], ...]

    def candidates(self, request: int, i: int, token: int) -> list[tuple[int, float]]:
        """The draft of a token on the target's path: ``token`` at its rank, and other ids around it."""
        chances, rank = self.pool[self.drafts[request][i]], self.ranks[request][i]
        ids = list(range(len(chances)))
        if token < len(ids):
            # The token's own rank goes to the id whose rank it takes, or to an id beyond all if it has no rank.
            ids[token] = rank if rank < len(ids) else len(ids)
        if rank < len(ids):
            ids[rank] = token
        return list(zip(ids, chances, strict=True))


@dataclass(frozen=True)
class Script:
    """``picks[r][i]``: request r's token i after the prompt; ``drafts[r][i]``: the index in ``pool`` of its draft.

    ``prompts[r]``: the tokens of request r's prompt. Each list in ``pool`` has the log chances of the drafter's
    candidates of one node, best first. Off the target's path a node's draft is any list of the pool, chosen by a hash
    of its path: drafts there are modelled like those on the path, and the target follows none of them.
    """

    prompts: tuple[int, ...]
    picks: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    pool: tuple[tuple[float, ...], ...]
    label: str
    block: int = 1
    """Levels that one pass of a block drafter drafts, a row each; 1: a pass for every level."""
    further: tuple[DistantDrafts, ...] = ()
    """Drafts by the number of tokens in between: one, two and so on; the last entry serves all beyond. Without any, a
    draft depends on its token alone."""
    shows_in_flight: bool = True
    """Whether a pass is shown the tokens in flight down to the node that it is asked about, or the committed ones
    alone."""

    @property
    def tokens(self) -> int:
        """Tokens of all requests, without prompts."""
        return sum(len(picks) for picks in self.picks)

    def with_again(self, request: int, tokens: int) -> Script:
        """The script with one more request, which has the first ``tokens`` tokens of ``request``."""

        def again(lists: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return (*lists, lists[request][:tokens])

        prompts = (*self.prompts, self.prompts[request])
        further = tuple(replace(one, drafts=again(one.drafts), ranks=again(one.ranks)) for one in self.further)
        return replace(self, prompts=prompts, picks=again(self.picks), drafts=again(self.drafts), further=further)

    def with_prompt(self, request: int, tokens: int) -> Script:
        """The script with a prompt of ``tokens`` tokens for ``request``."""
        return replace(self, prompts=(*self.prompts[:request], tokens, *self.prompts[request + 1 :]))

    def after(self, request: int, position: int) -> int:
        """The target's token after ``position`` of a request's path; ``MISSED`` after its last token."""
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
    further: Sequence[Sequence[float]] = (),
    persistence: float = 0.0,
) -> Script:
    """A script drawn from an accuracy profile, cumulative as ``synthetic``'s.

    Confidence varies from node to node, and is calibrated: a candidate is right as often as its chance says.
    ``further`` has the profiles of tokens with one, two and more tokens between them and the last one that the drafter
    was shown: the drafter is surest of the same nodes in all of them, and one random number decides a token's ranks in
    all, so that one which is easy to tell from near by is so from far away, too. ``persistence`` is the chance that a
    token is as easy as the one before it. Above 0, easy tokens come in stretches, as they do in texts: what follows a
    right draft is more often right than the profile says, and what follows a wrong one less often.
    """
    rng = random.Random(seed)
    pool = [confidence(accuracy, rng, concentration) for _ in range(PROFILE_POOL)]
    drafts, drawn = [], []
    for _ in range(requests):
        indices = [rng.randrange(PROFILE_POOL) for _ in range(tokens)]
        if persistence:
            for i in range(1, tokens):
                indices[i] = indices[i - 1] if rng.random() < persistence else indices[i]
        drafts.append(tuple(indices))
        drawn.append([rng.random() for _ in range(tokens)])

    def drafts_of(profile: Sequence[float], pool: Sequence[Sequence[float]]) -> DistantDrafts:
        sums = [list(accumulate(chances)) for chances in pool]
        # A number drawn uniformly falls into candidate k with its chance: the index is the rank of the target's token.
        pairs = (zip(*one, strict=True) for one in zip(drafts, drawn, strict=True))
        found = ([bisect_right(sums[i], x) for i, x in one] for one in pairs)
        ranks = tuple(tuple(rank if rank < len(profile) else MISSED for rank in one) for one in found)
        logs = tuple(tuple(math.log(max(p, FLOOR)) for p in chances) for chances in pool)
        return DistantDrafts(tuple(drafts), ranks, logs)

    first = drafts_of(accuracy, pool)
    label = f"profile {', '.join(f'{a:g}' for a in accuracy)}"
    surest_first = sorted(range(PROFILE_POOL), key=lambda i: -pool[i][0])
    distant = []
    for other in further:
        drawn_again = sorted((confidence(other, rng, concentration) for _ in range(PROFILE_POOL)), reverse=True)
        chances_by_index = dict(zip(surest_first, drawn_again, strict=True))
        distant.append(drafts_of(other, [chances_by_index[i] for i in range(PROFILE_POOL)]))
    return Script((prompt,) * requests, first.ranks, first.drafts, first.pool, label, further=tuple(distant))


def recording_script(chosen: Sequence[tuple[Recording, int]], tokens: int, label: str) -> Script:
    """A script of the first ``tokens`` tokens of recorded requests, each given as (recording, its request).

    On the path the candidates have the chances recorded for them, and the target's token is its rank among them. Off
    the path a node's draft is that of any of the recorded tokens.
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
    """The rank of a token among candidates; ``MISSED`` if it is none of them."""
    return candidates.index(token) if token in candidates else MISSED


def chances_of(recording: Recording, row: int) -> tuple[float, ...]:
    """Log chances of the candidates of a recording's row, without padding."""
    count = int((recording.candidates[row] != NO_TOKEN).sum())
    return tuple(recording.chances[row, :count].tolist())
