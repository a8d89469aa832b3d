"""How the target judges drafts: how far confidences can be trusted, how often drafts miss, what corrections gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.estimates.calibration import Calibration
from penstock.estimates.running_mean import SLOW, running_mean
from penstock.tree import Node


class DraftQuality:
    """Calibrates the drafter's first answers and its corrections separately.

    The drafter knows more about a node when it corrects itself, so the same confidence then means something else.
    """

    def __init__(self) -> None:
        self.first_answers = Calibration()
        self.corrections = Calibration()
        self.miss_rate = 0.5
        """Share of the target's tokens that no child of the root carried; a running mean."""
        self.by_drafter = False
        """Whether the drafter calibrates its candidates itself, with ``first_answers`` and ``corrections``. Their
        chances are then taken as they are, and the drafter records which of them were right."""
        self.correction_gain = 0.0
        """Share of tokens at which corrections made the drafter's best candidate right, less the share at which they
        made it wrong; a running mean."""

    def begin_with(self, miss_rate: float, trust: float) -> None:
        """Move the miss rate towards that of another run by ``trust`` (0 to 1). Call before anything is recorded."""
        self.miss_rate += trust * (miss_rate - self.miss_rate)

    def chances(self, node: Node) -> Iterator[float]:
        """Log chances of the drafter's candidates for ``node`` by the present calibration, best first."""
        assert node.candidates
        if self.by_drafter:
            return (chance for _, chance in node.candidates)
        return (self.corrections if node.earlier else self.first_answers).chances(node.candidates)

    def record_pick(self, node: Node) -> None:
        """Judge every answer that the drafter gave for ``node`` by the token that the target has picked after it."""
        assert node.candidates
        assert node.picked is not None
        answers = (*node.earlier, node.candidates)
        if not self.by_drafter:
            self.record_answers(answers, node.picked)
        first = answers[0]
        gain = (node.candidates[0][0] == node.picked) - (first[0][0] == node.picked)
        self.correction_gain = running_mean(self.correction_gain, gain, SLOW)

    def record_answers(self, answers: Sequence[Sequence[tuple[int, float]]], picked: int) -> None:
        """Record the pick for the drafter's first answer and for each of its corrections."""
        first, *corrections = answers
        self.first_answers.record(first, picked)
        for candidates in corrections:
            self.corrections.record(candidates, picked)

    def record_hits(self, hits: int, tokens: int) -> None:
        """Record that ``tokens`` tokens were committed, of which the first ``hits`` had been drafted."""
        for i in range(tokens):
            self.miss_rate = running_mean(self.miss_rate, i >= hits)
