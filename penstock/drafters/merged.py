"""Drafts from two sources in one tree, and prompt lookup as a drafter of its own."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.config import check, check_positive
from penstock.drafters.base import Draft, Drafter, DrafterOptions, DrafterParts, DraftRequest, InstantDrafter
from penstock.estimates.estimates import DraftQuality, DraftTiming, FadingShare
from penstock.requests.request import Request
from penstock.tree import Node

# ------------------------------------------------------------------------------------------------------------ followers
# An index of the tokens that followed each short run of tokens in a text. It grows with the text.


class Followers:
    """The tokens that followed each run of ``shortest`` to ``longest`` tokens of a text.

    A look-up takes as long in a long text as in a short one: it visits different followers, not occurrences.

        text         1  2  7  1  2  8  1  2
        after 2      7, then 8: the most recent one last
        after 1 2    7, then 8
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest = longest
        self.length = 0
        """Number of tokens of the text so far."""
        self._after: dict[int, dict[tuple[int, ...], int | dict[int, None]]] = {
            length: {} for length in range(longest, shortest - 1, -1)
        }
        """The only follower of a run or, where there have been several, a dict of them in the order of their last
        occurrence; by length and run."""
        self._tail: deque[int] = deque(maxlen=longest)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            tail = tuple(self._tail)
            for length, after in self._after.items():
                if length <= len(tail):
                    _note(after, tail[-length:], token)
            self._tail.append(token)
            self.length += 1

    def after(self, above: Sequence[int], count: int) -> dict[int, int]:
        """Up to ``count`` tokens that have followed the end of the text with ``above`` appended to it.

        Occurrences within ``above`` count, too. Each token is mapped to the length of the longest run that it followed;
        longer runs come first, then more recent followers.
        """
        found: dict[int, int] = {}
        for token, length in self._occurrences(above):
            found.setdefault(token, length)
            if len(found) == count:
                break
        return found

    def _occurrences(self, above: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The matches of ``after`` in order; a token may come more than once."""
        tokens = [*self._tail, *above]
        for length, after in self._after.items():
            if length > len(tokens):
                continue
            run = tuple(tokens[-length:])
            # Followers within ``above`` are more recent than any in the index, so they come first.
            yield from ((token, length) for token in _followed(tokens, length, len(tokens) - len(above)))
            found = after.get(run, ())
            yield from ((token, length) for token in ((found,) if isinstance(found, int) else reversed(found)))


def _note(after: dict[tuple[int, ...], int | dict[int, None]], run: tuple[int, ...], token: int) -> None:
    known = after.get(run)
    if known is None or known == token:
        after[run] = token
        return
    if isinstance(known, int):
        after[run] = known = {known: None}
    # Removed and inserted again, the token becomes the dict's last key, which is the most recent follower.
    known.pop(token, None)
    known[token] = None


def _followed(tokens: Sequence[int], length: int, first: int) -> Iterator[int]:
    """The tokens from index ``first`` on that follow the last ``length`` tokens, most recent first."""
    run = tokens[-length:]
    for place in range(len(tokens) - 1, max(first, length) - 1, -1):
        if tokens[place - length : place] == run:
            yield tokens[place]


# --------------------------------------------------------------------------------------------------------- rated lookup
# Prompt lookup whose chances are learned: it counts how often its candidates are right in the texts themselves.

RANKS: Final = 4
"""Number of ranks kept apart; all candidates from the last of them on count as one kind. Every token of a text is
looked up with so many candidates; with fewer ranks more of them share one chance."""
OF_ALL: Final = 1000.0
"""Number of verdicts on a kind, of all requests, over which old ones fade. So many tell a chance of a half to within
about 0.02 (one standard error). Fewer vary more; more are slower to follow texts that change."""
OF_ONE: Final = 32.0
"""Number of verdicts on a kind, of one request, over which old ones fade: a text copies for a while, and then does
not."""

Kind = tuple[int, int]
"""A kind of candidate: the length of the run that it followed, and its rank."""


class LookupRates:
    """Learns how often candidates of each kind are right.

    A request's own rates begin at those of ``all_requests``, and these at half the rate of the rank above.
    """

    def __init__(self, memory: float, all_requests: LookupRates | None = None) -> None:
        self._all_requests = all_requests
        self._right: defaultdict[Kind, FadingShare] = defaultdict(lambda: FadingShare(memory))

    def chance(self, kind: Kind) -> float:
        """The chance (0 to 1) that a candidate of this kind is right."""
        expected = self._all_requests.chance(kind) if self._all_requests is not None else 0.5 ** (kind[1] + 1)
        return self._right[kind].of(expected)

    def record(self, found: dict[int, int], picked: int) -> None:
        """Judge candidates, given with the lengths of their runs, by the token ``picked`` that followed."""
        for token, kind in kinds_of(found):
            self._right[kind].record(token == picked)
        if self._all_requests is not None:
            self._all_requests.record(found, picked)


def kinds_of(found: dict[int, int]) -> list[tuple[int, Kind]]:
    """Each token with its kind; ``found`` maps tokens to the lengths of their runs, best first."""
    return [(token, (length, min(rank, RANKS - 1))) for rank, (token, length) in enumerate(found.items())]


class RatedLookup:
    """Looks up the tokens that followed a node's last ``longest``..``shortest`` tokens in its own text, with their
    chances.

    Every token that a request produces is a verdict, whether anything was drafted there or not.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._rates = LookupRates(OF_ALL)
        self._texts: dict[int, tuple[Followers, LookupRates]] = {}
        """Index and rates of each request, by its number."""

    def candidates(self, request: Request, node: Node, count: int) -> list[tuple[int, float]]:
        """Up to ``count`` tokens, each with the chance that the target picks it; not sorted by chance."""
        text, rates = self._text(request)
        found = text.after(request.path_below_root(node), count)
        return [(token, rates.chance(kind)) for token, kind in kinds_of(found)]

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)

    def _text(self, request: Request) -> tuple[Followers, LookupRates]:
        """The request's index and rates, up to date with its committed tokens."""
        if request.number not in self._texts:
            own = LookupRates(OF_ONE, self._rates)
            self._texts[request.number] = Followers(self._longest, self._shortest), own
        text, rates = self._texts[request.number]
        given = len(request.prompt)
        # Prompt tokens are only indexed: they are no picks of the target, so they judge nothing.
        text.extend(node.token for node in request.committed[text.length : given])
        for node in request.committed[text.length :]:
            rates.record(text.after([], RANKS), node.token)
            text.extend([node.token])
        return text, rates


# --------------------------------------------------------------------------------------------------------------- merged
# Merges two sources of drafts into one tree: a drafter, and prompt lookup beside it.

SURE: Final = 0.9
"""Chance (0 to 1) of a looked-up token from which on the drafter is not asked, since the answer is there at once. A run
of four tokens or more begins with that chance (``FIRST``)."""
UNLIKELY: Final = 0.2
"""Chance (0 to 1) of a node's path below which the drafter is not asked about it while another answer is sure. At 0 the
drafter would be asked about every such node, at 1 about none."""
START: Final = 0.1
"""Lookup's initial weight, as a fraction of the chance that the drafter's best candidate is wrong. It counts as much as
four verdicts (``estimates.SHARE_TRUST``)."""
SUREST: Final = 8
"""Largest class of the drafter's certainty, in nats: minus log of the chance that its best candidate is wrong. There
the best candidate is wrong once in 3,000 cases, and further classes would see few."""
MEMORY: Final = 500.0
"""Number of tokens over which old ones fade in lookup's weight. With fewer the weight varies more; with more it is
slower to follow texts that change."""
FAINT: Final = -12.0
"""Log chance of a token that is not among the drafter's candidates. It is 6 in a million. A chance of 0 would be
divided by where lookup does not name the token either."""

Candidates = Sequence[tuple[int, float]]
"""Tokens with their chances, or the logs of these."""
Context = tuple[bool, int, int]
"""The key under which lookup's weight is learned (``context_of``)."""


@dataclass(slots=True)
class Asked:
    """A node that the drafter was asked about, with the tokens looked up for it and the drafter's answers."""

    request: Request
    node: Node
    count: int
    found: Candidates
    answers: list[Candidates] = field(default_factory=list)
    """The drafter's candidates, the first answer first; all others are corrections."""
    own: Candidates = ()
    """The first answer with the chances that its calibration gave it."""


class MergedDrafter:
    """Candidates of a drafter and of prompt lookup, each calibrated by itself, best first.

    Where the text has gone on in the same way again and again, a looked-up token is almost sure, and is the answer at
    once. The drafter is then left alone, so that a copied passage is drafted as fast as by lookup alone. Everywhere
    else the drafter answers in its own time, and looked-up tokens join its candidates with the share in which they were
    right.

    The chances of the mixture are taken as they are: another calibration would count the same verdicts twice.

    A token's chance is (1 - w) p + w q, where p is its chance by the drafter and q its chance by lookup. The weight w
    is the share of tokens that lookup explains better (deleted interpolation, Jelinek and Mercer, 1980; with a text's
    own past as one of two models, Kuhn and De Mori, 1990). It is learned separately for sampled and greedy requests,
    and by how sure each source is. A single weight would charge a sure drafter for lookup's worth where the drafter is
    unsure: 5% of each level, which a path of ten levels multiplies.
    """

    def __init__(self, drafter: Drafter, lookup: RatedLookup) -> None:
        self.inner = drafter
        self._lookup = lookup
        self._quality = DraftQuality()
        """The engine's record of drafts, by which the drafter's own candidates are calibrated."""
        self._weights: defaultdict[Context, FadingShare] = defaultdict(lambda: FadingShare(MEMORY))
        """Lookup's weight in each context."""
        self._asked: dict[int, Asked] = {}
        """The nodes that the drafter was asked about, by node id."""
        self._learned: dict[int, int] = {}
        """Number of committed nodes whose picks the drafter's calibration has taken in, by request."""
        self._answers: list[Draft] = []

    @property
    def reads_target(self) -> bool:
        return self.inner.reads_target

    @property
    def rows_per_node(self) -> int:
        return self.inner.rows_per_node

    @property
    def free(self) -> bool:
        return self.inner.free

    @property
    def busy(self) -> bool:
        return self.inner.busy or bool(self._answers)

    @property
    def timing(self) -> DraftTiming:
        return self.inner.timing

    def calibrate_by(self, quality: DraftQuality) -> None:
        self._quality = quality
        quality.by_drafter = True

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        """Begin a round. Only the drafter needs rows; a look-up needs none."""
        left = [rest for ask in asks if (rest := self._look_up(ask)).nodes]
        return self.inner.ask(left) if left else 0

    def poll(self) -> list[Draft]:
        answers, self._answers = self._answers, []
        return answers + [self._with_lookup(draft) for draft in self.inner.poll()]

    @property
    def due(self) -> float | None:
        return 0.0 if self._answers else self.inner.due

    def prepare_grammar(self, request: Request) -> None:
        self.inner.prepare_grammar(request)

    def has_grammar(self, request: Request) -> bool:
        return self.inner.has_grammar(request)

    def forget(self, request: Request) -> None:
        self._learned.pop(request.number, None)
        self._asked = {number: asked for number, asked in self._asked.items() if asked.request is not request}
        self._lookup.forget(request)
        self.inner.forget(request)

    def close(self) -> None:
        self.inner.close()

    def _look_up(self, ask: DraftRequest) -> DraftRequest:
        """Answer for nodes whose look-ups are sure enough. Returns the nodes that are left for the drafter."""
        self._learn(ask.request)
        root = ask.request.tree.root
        found = [(node, self._lookup.candidates(ask.request, node, ask.count)) for node in ask.nodes if node.alive]
        any_sure = any(is_sure(candidates) for _, candidates in found)
        left = [node for node in ask.nodes if not node.alive]
        for node, candidates in found:
            passed_over = any_sure and node.score - root.score < math.log(UNLIKELY)
            if is_sure(candidates) or passed_over:
                self._answers.append(Draft(node, mixed((), candidates, 1.0, ask.count)))
            else:
                self._asked[node.id] = Asked(ask.request, node, ask.count, candidates)
                left.append(node)
        return replace(ask, nodes=left)

    def _learn(self, request: Request) -> None:
        """Take in the target's picks since the last call: they judge the drafter's candidates and lookup's weight."""
        committed, known = request.committed, self._learned.get(request.number, 0)
        if known == len(committed):
            return
        # A node is judged by the token after it, so the last one has to wait for the next call.
        for i in range(max(0, known - 1), len(committed) - 1):
            asked = self._asked.get(committed[i].id)
            if asked is not None and asked.answers:
                self._quality.record_answers(asked.answers, committed[i + 1].token)
                self._weigh(asked, committed[i + 1].token)
        self._learned[request.number] = len(committed)
        self._asked = {
            number: asked for number, asked in self._asked.items() if asked.node.open or asked.request is not request
        }

    def _weigh(self, asked: Asked, picked: int) -> None:
        """Update lookup's weight by how much of the picked token lookup explains (one step of expectation
        maximisation)."""
        if not asked.found:
            return
        weight = self._weight(asked)
        by_lookup = weight * dict(asked.found).get(picked, 0.0)
        by_drafter = (1 - weight) * math.exp(dict(asked.own).get(picked, FAINT))
        self._weights[context_of(asked)].record(by_lookup / (by_lookup + by_drafter))

    def _weight(self, asked: Asked) -> float:
        return self._weights[context_of(asked)].of(START * left_by(asked.own)) if asked.found else 0.0

    def _with_lookup(self, draft: Draft) -> Draft:
        """The drafter's answer or correction, mixed with the tokens looked up when it was asked."""
        asked = self._asked.get(draft.node.id)
        if draft.candidates is None or asked is None:
            return draft
        calibration = self._quality.corrections if asked.answers else self._quality.first_answers
        chances = calibration.chances(draft.candidates)
        own = [(token, chance) for (token, _), chance in zip(draft.candidates, chances, strict=True)]
        if not asked.answers:
            asked.own = own
        asked.answers.append(draft.candidates)
        return Draft(draft.node, mixed(own, asked.found, self._weight(asked), asked.count))


def is_sure(found: Candidates) -> bool:
    """Whether any of lookup's (token, chance) is as good as certain."""
    return any(chance >= SURE for _, chance in found)


def context_of(asked: Asked) -> Context:
    """The key of lookup's weight: whether the request is sampled, the quarter in which lookup's best chance lies, and
    how sure the drafter is, in nats."""
    found = int(4 * max(chance for _, chance in asked.found))
    left = left_by(asked.own)
    return asked.request.sampling.temperature > 0, found, int(min(SUREST, -math.log(left))) if left else SUREST


def left_by(own: Candidates) -> float:
    """The chance that the token is not the drafter's best candidate."""
    return 1.0 - math.exp(own[0][1]) if own else 1.0


def mixed(own: Candidates, found: Candidates, weight: float, count: int) -> list[tuple[int, float]]:
    """The ``count`` best tokens of both sources with their log chances, best first.

    ``own`` are the drafter's (token, log chance), ``found`` lookup's (token, chance). Ties go to the drafter's.
    """
    chances = {token: (1 - weight) * math.exp(chance) for token, chance in own}
    for token, chance in found:
        chances[token] = chances.get(token, 0.0) + weight * chance
    best = sorted(chances.items(), key=lambda entry: -entry[1])[:count]
    return [(token, math.log(chance) if chance else -math.inf) for token, chance in best]


# ---------------------------------------------------------------------------------------------------------------- ngram
# Prompt lookup: proposes the tokens that followed the same tokens earlier in the text (Saxena 2023; vLLM's
# ``ngram``).

FIRST: Final = (0.15, 0.65, 0.75, 0.9)
"""Chance of the first candidate by the length of its run: one, two, three, and four tokens or more. Of 1,255 tokens
that SmolLM2-135M-Instruct wrote greedily, copies and answers of three prompt sets, it was right in 14, 67, 72 and 94%.
"""
NEXT: Final = 0.05
"""Chance of each further candidate, as a fraction of the chance that those before it leave: 4% were right."""


@dataclass(frozen=True, kw_only=True)
class NgramOptions(DrafterOptions):
    """Options of ``ngram``, prompt lookup (Saxena, 2023). Raises FieldError for a number out of its field's range."""

    prompt_lookup_max: int = 4
    """Most tokens of the text's end that are looked up earlier in it (vLLM's name)."""
    prompt_lookup_min: int = 1
    """Fewest tokens of the text's end that are looked up, 1 to ``prompt_lookup_max`` (vLLM's name)."""

    def __post_init__(self) -> None:
        check_positive(self, "prompt_lookup_max", "prompt_lookup_min")
        check(
            self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min",
            self.prompt_lookup_min,
            f"at most prompt_lookup_max, {self.prompt_lookup_max}",
        )

    def start(self, parts: DrafterParts) -> NgramDrafter:
        return NgramDrafter(self.prompt_lookup_max, self.prompt_lookup_min)

    def beside(self, drafter: Drafter) -> Drafter:
        """Another drafter, with prompt lookup beside it."""
        return MergedDrafter(drafter, RatedLookup(self.prompt_lookup_max, self.prompt_lookup_min))


class NgramDrafter(InstantDrafter):
    """Finds the longest earlier occurrence of the last ``longest``..``shortest`` tokens of a node's path.

    All tokens that followed an occurrence are candidates: those after longer matches first, then the more recent. The
    longer the match, the higher the first one's chance (``FIRST``), since the drafter has no model of its own.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        super().__init__()
        self._longest = longest
        self._shortest = shortest
        self._texts: dict[int, Followers] = {}
        """The committed text of each request."""

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for ask in asks:
            text = self._text(ask.request)
            self._answers += [self._look_up(text, ask.request, node, ask.count) for node in ask.nodes]
        return len(self._answers)

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)

    def _text(self, request: Request) -> Followers:
        """The request's index, up to date with its committed tokens. A recomputed request has the same
        text as before."""
        text = self._texts.setdefault(request.number, Followers(self._longest, self._shortest))
        text.extend(node.token for node in request.committed[text.length :])
        return text

    def _look_up(self, text: Followers, request: Request, node: Node, count: int) -> Draft:
        if not node.alive:
            return Draft(node, [])
        found = text.after(request.path_below_root(node), count)
        return Draft(node, [*zip(found, log_chances(found.values()), strict=True)])


def log_chances(runs: Iterable[int]) -> Iterator[float]:
    """Log chances of candidates, best first, by the lengths of the runs that they followed. Only the first length
    matters."""
    left = 1.0
    for rank, run in enumerate(runs):
        chance = left * (NEXT if rank else FIRST[min(run, len(FIRST)) - 1])
        yield math.log(chance)
        left -= chance
