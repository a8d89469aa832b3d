"""What the target makes of drafts: how far they can be trusted, how often they miss, what corrections are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.estimates.calibration import Calibration
from penstock.estimates.running_mean import SLOW, running_mean
from penstock.tree import Node


class DraftQuality:
    """First answers of the drafter and its corrections are calibrated apart.

    It knows more of a node when it corrects itself, so that the same confidence means something else.
    """

    def __init__(self) -> None:
        self.first_answers = Calibration()
        self.corrections = Calibration()
        self.miss_rate = 0.5
        """Share of the target's tokens that no child of the root carried; a running mean."""
        self.by_drafter = False
        """Whether the drafter calibrates its candidates itself, in ``first_answers`` and ``corrections``: then their
        chances are taken as they are, and it records what became of them."""
        self.correction_gain = 0.0
        """Share of tokens at which corrections made the drafter's best candidate right, less the share at which they
        made it wrong; a running mean."""

    def begin_with(self, miss_rate: float, trust: float) -> None:
        """Nothing has been seen yet: of another run, by ``trust``."""
        self.miss_rate += trust * (miss_rate - self.miss_rate)

    def chances(self, node: Node) -> Iterator[float]:
        """Log chances of the candidates that the drafter has given for ``node``, as of now, best first."""
        assert node.candidates
        if self.by_drafter:
            return (chance for _, chance in node.candidates)
        return (self.corrections if node.earlier else self.first_answers).chances(node.candidates)

    def record_pick(self, node: Node) -> None:
        """The target has picked what follows ``node``: a verdict on every answer of the drafter for it."""
        assert node.candidates
        assert node.picked is not None
        answers = (*node.earlier, node.candidates)
        if not self.by_drafter:
            self.record_answers(answers, node.picked)
        first = answers[0]
        gain = (node.candidates[0][0] == node.picked) - (first[0][0] == node.picked)
        self.correction_gain = running_mean(self.correction_gain, gain, SLOW)

    def record_answers(self, answers: Sequence[Sequence[tuple[int, float]]], picked: int) -> None:
        """The target has picked this token where the drafter had these candidates, and then corrected itself."""
        first, *corrections = answers
        self.first_answers.record(first, picked)
        for candidates in corrections:
            self.corrections.record(candidates, picked)

    def record_hits(self, hits: int, tokens: int) -> None:
        """So many tokens have been committed, the first ``hits`` of which had been drafted."""
        for i in range(tokens):
            self.miss_rate = running_mean(self.miss_rate, i >= hits)
