"""Plain decoding's picks and features in the place of the target's layers, for runs in virtual time.

Whatever the strategy, a row on the path of plain decoding's text gets the pick and the features that it got there, and
what other rows get is never committed. So the target computes each text once, plainly, and not again for every entry
and every drafted node, which is nine tenths of such a run's arithmetic. Times are the modelled devices' either way.

An early exit, SPD, EAGLE and Headrace read features of nodes in flight, also of such as turn out to be off the text.
They would read zeros here and order their candidates otherwise. ``REPLAYED`` are the methods that do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock import LLM
from penstock.lab.bench.comparison import decode
from penstock.lab.grid import Question
from penstock.messages import SampledToken, Sampling
from penstock.pipeline.base import StagePlan, VirtualClock
from penstock.pipeline.engine_end import InProcessExecutor, InProcessPipeline
from penstock.stage.visibility import BatchView

REPLAYED: Final = frozenset({"ngram", "draft_model", "medusa", "dflash", "dspark"})
"""Methods of drafters that read no feature of a node that may be off the text."""


@dataclass
class Text:
    """A question's tokens, with the pick and the features of each position but the last token's."""

    tokens: list[int] = field(default_factory=list)
    picks: dict[int, SampledToken] = field(default_factory=dict)
    features: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """Stage -> position -> features [F]."""


class Replay:
    """The texts of a run, and the one that is decoded now: computed and recorded first, then replayed."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self.current = Text()
        self.recording = True

    def record(self, llm: LLM, questions: Sequence[Question]) -> None:
        """Decode every question plainly, alone, and remember what the target says of its text."""
        for question in questions:
            self.current = Text()
            self.texts.append(self.current)
            (output,) = decode(llm, [question.prompt], [question.params], None)
            llm.loop.drain()
            assert output.prompt_token_ids is not None
            self.current.tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        self.recording = False
        self.turn_to("", 0)

    def turn_to(self, entry: str, question: int, questions: int = 0) -> None:
        """The next request asks ``question``, whatever the entry. Called as progress of a comparison."""
        self.current = self.texts[question]


class ReplayedLayers:
    """A stage's layers, which compute only while texts are recorded. Everything else about them is the layers' own."""

    def __init__(self, layers: Any, stage: int, replay: Replay) -> None:
        self._layers, self._stage, self._replay = layers, stage, replay
        self._on_text: set[int] = set()
        """Slots whose tokens, with all before them, are the text's."""
        self._rows: list[tuple[int, bool]] = []
        """The position of each row computed last, and whether it is on the text."""
        self._width = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)

    def forward(self, view: BatchView, hidden: Any) -> Any:
        if self._replay.recording:
            self._rows = [(position, True) for position in view.positions.tolist()]
            return self._layers.forward(view, hidden)
        columns = (view.positions, view.tokens, view.slots, view.parents)
        self._rows = [self._entered(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return torch.zeros(len(view), 1)

    def features(self, hidden: Any) -> Any:
        known = self._replay.current.features.setdefault(self._stage, {})
        if self._replay.recording:
            states = self._layers.features(hidden)
            self._width = states.shape[-1]
            known.update((position, one.clone()) for (position, _), one in zip(self._rows, states, strict=True))
            return states
        nothing = next(iter(known.values())).new_zeros(self._width)
        return torch.stack([known.get(position, nothing) if right else nothing for position, right in self._rows])

    def pick(
        self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[SampledToken]:
        known = self._replay.current.picks
        if self._replay.recording:
            picks: list[SampledToken] = self._layers.pick(view, hidden, wanted, samplings)
            known.update((int(view.positions[row]), pick) for row, pick in zip(wanted, picks, strict=True))
            return picks
        return [self._picked(known, int(view.nodes[row]), *self._rows[row]) for row in wanted]

    def _entered(self, position: int, token: int, slot: int, parent: int) -> tuple[int, bool]:
        tokens = self._replay.current.tokens
        right = position < len(tokens) and tokens[position] == token and (position == 0 or parent in self._on_text)
        (self._on_text.add if right else self._on_text.discard)(slot)
        return position, right

    @staticmethod
    def _picked(known: dict[int, SampledToken], node: int, position: int, right: bool) -> SampledToken:
        return replace(known[position], node=node) if right and position in known else SampledToken(node, 0)


class ReplayingExecutor(InProcessExecutor):
    """Engines in one process under a virtual clock, whose target is replayed; its drafter computes."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(VirtualClock())
        self._replay = replay
        self._of_target = False

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> InProcessPipeline:
        self._of_target = name == "stage"
        return super().begin(plans, name)

    def layers(self, plan: StagePlan) -> Any:
        loaded = super().layers(plan)
        return ReplayedLayers(loaded, plan.first, self._replay) if self._of_target else loaded
