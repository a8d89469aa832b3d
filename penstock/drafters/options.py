"""The options of a drafter that users may set, the parts that it needs, and how it is started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar

from penstock.drafters.base import Drafter
from penstock.pipeline.base import Pipeline
from penstock.requests.request import Request

if TYPE_CHECKING:
    from penstock.models.speculators.base import SpeculatorCheckpoint


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
