"""The interface of drafters, their options, the registry of all, and the synthetic drafter for measuring engines."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from penstock.config import FieldError, Registry, check
from penstock.estimates.estimates import DraftQuality, DraftTiming
from penstock.pipeline.base import Pipeline
from penstock.requests.request import Request
from penstock.tree import Node

if TYPE_CHECKING:
    from penstock.models.speculators.base import SpeculatorCheckpoint

# ----------------------------------------------------------------------------------------------------------------- base
# The interface of drafters, which propose children for nodes of a request's tree.


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
    levels: float = math.inf
    """Most levels below the node of a block at which that block may answer; nodes further down get a block of their
    own."""


class Draft(NamedTuple):
    """Candidates for one node, best first, as (token, log of the chance that the target picks it).

    None if the drafter cannot answer yet, but may be able to once the root has moved or the node has entered.
    """

    node: Node
    candidates: Sequence[tuple[int, float]] | None


class Drafter(Protocol):
    """Proposes children for nodes, one round at a time.

    It answers asynchronously (``ask``, then ``poll``), so that drafting never blocks the engine.
    """

    @property
    def reads_target(self) -> bool:
        """Whether it reads the target's states, so that it may know more about a node when asked again."""
        ...

    @property
    def free(self) -> bool:
        """Whether it answers without taking a device's time, so that asking in vain loses nothing."""
        ...

    @property
    def rows_per_node(self) -> int:
        """Rows that a pass computes for each node that it is asked about: several where it drafts a block."""
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

    def close(self) -> None:
        """End what it computes with, if it has any weights."""
        ...


def size_in_nodes(drafter: Drafter, rows: int, asks: Sequence[DraftRequest]) -> int:
    """Size of a drafter's round in nodes, in which strategies reckon: its rows, divided by the rows of a node.

    It is 0 where the round says nothing of the time of a node: where nothing is computed, where a block drafter
    computes less than a block, and where it computes mostly context, as after a prompt.
    """
    each = drafter.rows_per_node
    most = 2 * each * sum(len(ask.nodes) for ask in asks) if each > 1 else math.inf
    return round(rows / each) if each <= rows <= most else 0


# -------------------------------------------------------------------------------------------------------------- options
# The options of a drafter that users may set, the parts that it needs, and how it is started.


class Weights(Enum):
    """The kind of weights that a drafter computes with."""

    NONE = auto()
    DRAFT_MODEL = auto()
    """A small model with the target's tokenizer."""
    SPECULATOR = auto()
    """A module that was trained on the target's hidden states and reads them."""


@dataclass(frozen=True)
class DrafterParts:
    """The parts that the engine gives a drafter to start with."""

    vocab_size: int
    """Size of the target's vocabulary."""
    layers: Sequence[tuple[int, int]]
    """The target's layers [first, last) of each stage."""
    chunk: int
    """Upper limit of the rows of one of the drafter's batches."""
    speculator: SpeculatorCheckpoint | None
    """The speculator's checkpoint; None where the drafter has no such weights."""
    answer: Callable[[Request], Sequence[int]]
    """Returns a request's output under plain decoding; only the synthetic drafter calls it."""
    start_weights: Callable[[], Pipeline]
    """Starts the drafter's weights as a pipeline of one stage."""


@dataclass(frozen=True)
class DrafterOptions(ABC):
    """Base of the drafters' options: frozen dataclasses that raise FieldError for a value that cannot be used."""

    weights: ClassVar[Weights] = Weights.NONE
    """Weights that have to be loaded. Where they come from a checkpoint, there is an option ``model``."""
    priced_as: ClassVar[Weights] = Weights.NONE
    """Weights whose passes a modelled device has to spend time on; with ``NONE`` answers are immediate
    on any device."""

    of_target: ClassVar[bool] = False
    """Whether the weights are in the target's own checkpoint unless another place is named."""

    @property
    def model(self) -> str | None:
        """Folder or hub name of the weights; None where there is none."""
        return None

    @property
    def needs_entered(self) -> str | None:
        """The option, in the user's words, that forbids drafting from nodes that have not entered; None if that is
        allowed."""
        return None

    def check_speculator(self, speculator: SpeculatorCheckpoint, layers: Sequence[tuple[int, int]]) -> None:
        """Raise FieldError where the speculator was trained for stages with other layers."""
        return

    @abstractmethod
    def start(self, parts: DrafterParts) -> Drafter:
        """Start the drafter. Raises PipelineError where its weights cannot be started."""


# -------------------------------------------------------------------------------------------------------------- instant
# Base class of drafters that answer as soon as they are asked.


class InstantDrafter:
    """Holds answers until they are polled; subclasses define ``ask``."""

    def __init__(self) -> None:
        self._answers: list[Draft] = []

    @property
    def reads_target(self) -> bool:
        return False

    @property
    def free(self) -> bool:
        return True

    @property
    def rows_per_node(self) -> int:
        return 1

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    @property
    def timing(self) -> DraftTiming:
        return DraftTiming()

    def calibrate_by(self, quality: DraftQuality) -> None:
        """Does nothing: the engine calibrates this drafter's candidates."""

    def poll(self) -> list[Draft]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def due(self) -> float | None:
        return 0.0 if self._answers else None

    def prepare_grammar(self, request: Request) -> None:
        """Does nothing: the drafter ignores grammars."""

    def has_grammar(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------- registry
# All drafters by the name that users give, the method. A new one is a file of the package and a line here.

DRAFTERS: Final[Registry[DrafterOptions]] = Registry(
    "penstock.drafters",
    {
        "draft_model": "learned:SmallModelOptions",
        "dflash": "learned:BlockOptions",
        "dspark": "learned:BlockOptions",
        "eagle": "learned:FollowingOptions",
        "eagle3": "learned:FollowingOptions",
        "early_exit": "spd:EarlyExitOptions",
        "headrace": "learned:BlockOptions",
        "jetspec": "learned:BlockOptions",
        "medusa": "learned:FollowingOptions",
        "mtp": "learned:MtpOptions",
        "ngram": "merged:NgramOptions",
        "peagle": "learned:BlockOptions",
        "spd": "spd:SpdOptions",
        "synthetic": "base:SyntheticOptions",
    },
)


# ------------------------------------------------------------------------------------------------------------ synthetic
# A synthetic drafter that knows the answer and is right with a stated accuracy. It measures engines, not models.

FLOOR = 1e-4
"""Chance given to candidates beyond the profile, so that every log chance is finite."""
CONCENTRATION = 1.28
"""Sum alpha + beta of the Beta distribution from which a node's confidence is drawn, as measured on the demo pair; the
greedy draft's figure is in its model card."""


STRIDE = 7919
"""Distance between the ids of the arbitrary tokens: a prime, so that they differ unless it divides the vocabulary's
size."""


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions(DrafterOptions):
    """Options of ``synthetic``. Raises FieldError without ``accuracy`` and for a value out of its field's range."""

    priced_as = Weights.DRAFT_MODEL

    accuracy: tuple[float, ...] | None = None
    """Chances, 0 to 1 and never falling, that the target's token is among the first 1, 2, ... candidates. They have to
    be given, for example ``[0.7, 0.8, 0.85]``."""
    seed: int = 0
    """Decides which drafts are right; 0 or above."""

    def __post_init__(self) -> None:
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        if self.accuracy is None:
            raise FieldError("accuracy", "is missing: method 'synthetic' needs it, for example [0.7, 0.8, 0.85]")
        check_accuracy(self.accuracy)

    def start(self, parts: DrafterParts) -> SyntheticDrafter:
        assert self.accuracy is not None
        return SyntheticDrafter(self.accuracy, parts.vocab_size, self.seed, parts.answer)


def check_accuracy(accuracy: tuple[float, ...]) -> None:
    """Raise FieldError unless the profile is a list of cumulative chances for 1, 2, ... candidates."""
    holds = bool(accuracy) and all(0.0 <= chance <= 1.0 for chance in accuracy) and list(accuracy) == sorted(accuracy)
    check(holds, "accuracy", list(accuracy), "a list of chances between 0 and 1, none below the one before it")


def confidence(accuracy: Sequence[float], rng: random.Random, concentration: float = CONCENTRATION) -> list[float]:
    """One node's chance of each candidate, best first; the mean over nodes is the steps of the profile.

    The first chance is drawn from a Beta distribution around ``accuracy[0]`` with alpha + beta = ``concentration``; the
    others share the rest in the profile's proportions.
    """
    steps = [above - below for below, above in pairwise([0.0, *accuracy])]
    first, second = accuracy[0], steps[1] if len(steps) > 1 else 0.0
    least = second / (1 - first + second) if second else 0.0  # below it the second candidate would be the likelier one
    drawn = first
    if least < first < 1.0:
        mean = (first - least) / (1 - least)
        drawn = least + (1 - least) * rng.betavariate(concentration * mean, concentration * (1 - mean))
    rest = (1 - drawn) / (1 - first) if first < 1.0 else 0.0
    return [drawn, *(step * rest for step in steps[1:])]


class SyntheticDrafter(InstantDrafter):
    """Places the target's token among its first k candidates with probability ``accuracy[k-1]`` (cumulative).

    ``answer(request)`` is the whole output of plain decoding. As with a real drafter, some nodes are easy and some
    hard: the chance of a node's first candidate is drawn around ``accuracy[0]``, and the others share the rest in the
    profile's proportions. On the target's path the rank of the target's token is drawn from exactly these chances, so
    the drafter is calibrated and the stated accuracy holds on average. Off the path every candidate is wrong. The other
    candidates are arbitrary tokens. Any figure made with this drafter has to say so.
    """

    def __init__(
        self, accuracy: Sequence[float], vocabulary: int, seed: int, answer: Callable[[Request], Sequence[int]]
    ) -> None:
        super().__init__()
        self._accuracy = tuple(accuracy)
        self._vocabulary = vocabulary
        self._seed = seed
        self.answer = answer

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for ask in asks:
            self._answers += [self._draft(ask.request, node, ask.count) for node in ask.nodes]
        prompts = [len(ask.request.prompt) for ask in asks if ask.request.produced == 0]
        return len(self._answers) + sum(prompts)

    def _draft(self, request: Request, node: Node, count: int) -> Draft:
        if not node.alive:
            return Draft(node, [])
        # One draw per branch: when a node is asked, and by which strategy, changes nothing.
        path = request.path(node)
        count = min(count, self._vocabulary - 1)
        sampling = request.sampling
        rng = random.Random(repr((self._seed, sampling.seed, sampling.sample, path[-8:], len(path))))
        chances = confidence(self._accuracy, rng)
        truth = self._truth(request, path)
        first = rng.randrange(self._vocabulary)
        tokens = [(first + STRIDE * k) % self._vocabulary for k in range(count + 1)]
        # One token more than is wanted was drawn, so that there are enough without the right one, which its rank then
        # puts in its place.
        tokens = [token for token in tokens if token != truth][:count]
        rank = bisect_right(list(accumulate(chances)), rng.random())
        if truth is not None and rank < min(count, len(chances)):
            tokens[rank] = truth
        padded = [*chances[:count], *[0.0] * (count - len(chances))]
        return Draft(node, [(token, math.log(max(p, FLOOR))) for token, p in zip(tokens, padded, strict=False)])

    def _truth(self, request: Request, path: Sequence[int]) -> int | None:
        """The target's token after ``path``; None if plain decoding does not take this path."""
        answer = self.answer(request)
        above = len(path) - len(request.prompt)
        if above >= len(answer) or list(path[len(request.prompt) :]) != list(answer[:above]):
            return None
        return int(answer[above])
