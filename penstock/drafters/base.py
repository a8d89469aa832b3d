"""The interface of drafters, their options, and the registry of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from penstock.config import Registry
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
    """Most rows of one of the drafter's batches."""
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
        "draft_model": "small_model:SmallModelOptions",
        "dflash": "block:BlockOptions",
        "dspark": "block:BlockOptions",
        "eagle": "learned:FollowingOptions",
        "eagle3": "learned:FollowingOptions",
        "early_exit": "spd:EarlyExitOptions",
        "jetspec": "block:BlockOptions",
        "medusa": "learned:FollowingOptions",
        "mtp": "learned:MtpOptions",
        "ngram": "merged:NgramOptions",
        "spd": "spd:SpdOptions",
        "synthetic": "synthetic:SyntheticOptions",
    },
)
