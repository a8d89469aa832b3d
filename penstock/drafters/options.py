"""What a drafter's file declares beside it: the options that users may set, what it needs, and how it is started."""

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
    """Weights of its own that a drafter computes with."""

    NONE = auto()
    DRAFT_MODEL = auto()
    """A small model with the target's tokenizer."""
    SPECULATOR = auto()
    """A module that was trained on the target's hidden states and reads them."""


@dataclass(frozen=True)
class DrafterParts:
    """What the engine gives a drafter to start with."""

    vocab_size: int
    """The target's."""
    layers: Sequence[tuple[int, int]]
    """The target's layers [first, last) that each stage holds."""
    chunk: int
    """Most rows of one of the drafter's batches."""
    speculator: SpeculatorCheckpoint | None
    """The checkpoint, where the weights are a speculator's."""
    answer: Callable[[Request], Sequence[int]]
    """What plain decoding gives for a request; only the synthetic drafter asks."""
    start_weights: Callable[[], Pipeline]
    """Start the drafter's weights as a pipeline of one stage."""


@dataclass(frozen=True)
class DrafterOptions(ABC):
    """Subclasses are frozen dataclasses. They raise FieldError for a value that cannot be used."""

    weights: ClassVar[Weights] = Weights.NONE
    """Where they come from a checkpoint, there is an option ``model``."""
    priced_as: ClassVar[Weights] = Weights.NONE
    """Whose passes a modelled device is to take for it; ``NONE``: its answers are there at once on any device."""

    of_target: ClassVar[bool] = False
    """Whether the weights are in the target's own checkpoint where no other place is named."""

    @property
    def model(self) -> str | None:
        """The weights' folder or hub name, if any has been given."""
        return None

    @property
    def needs_entered(self) -> str | None:
        """Why nothing is drafted from a node that has not entered, in the user's words; None where that may be."""
        return None

    def check_speculator(self, speculator: SpeculatorCheckpoint, layers: Sequence[tuple[int, int]]) -> None:
        """Raise FieldError where the speculator was trained for other stages than those with these layers."""
        return

    @abstractmethod
    def start(self, parts: DrafterParts) -> Drafter:
        """The drafter, ready to be asked. Raises PipelineError where its weights cannot be started."""
