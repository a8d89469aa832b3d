"""The synthetic profile that simulations draw from where no recording is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.lab.grid import PLAIN
from penstock.lab.script import Script
from penstock.speculation import SpeculativeConfig

ACCURACY = (0.70, 0.80, 0.85, 0.88, *(round(0.88 + 0.07 * k / 12, 4) for k in range(1, 13)))
"""Chance that the target's token is among the first 1, 2, ... candidates."""


def synthetic(strategy: str) -> SpeculativeConfig | None:
    """A strategy with a drafter of this profile; None for plain decoding."""
    return None if strategy == PLAIN else SpeculativeConfig(method="synthetic", accuracy=ACCURACY, strategy=strategy)


def cut(script: Script, prompts: Sequence[int], answers: Sequence[int]) -> Script:
    """The script with prompts and answers of so many tokens; no answer becomes longer."""
    return replace(
        script,
        prompts=tuple(prompts),
        picks=tuple(picks[:length] for picks, length in zip(script.picks, answers, strict=True)),
        drafts=tuple(drafts[:length] for drafts, length in zip(script.drafts, answers, strict=True)),
    )
