"""What ``penstock train`` is asked for; whatever can be refused without reading a file is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config import FieldError, check, check_positive, nearest

KINDS: Final = ("eagle", "eagle3", "medusa")
DTYPES: Final = ("float32", "bfloat16")
DEVICES: Final = ("cpu", "cuda")
SHORTEST: Final = 8
"""Fewest tokens that ``max_length`` may be."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the command line says. Raises FieldError."""

    kind: str
    model: str
    """The target's folder or hub id."""
    data: tuple[Path, ...]
    """Files, or folders of files: .jsonl of conversations or texts, anything else as plain text."""
    output: Path
    """The trained drafter's folder. Its subfolder ``training`` keeps the cache, the state and the curves."""
    epochs: int = 1
    max_steps: int | None = None
    """End after so many optimiser steps, even within an epoch."""
    learning_rate: float | None = None
    """The highest of the schedule; None: the kind's own, which is meant for targets of several billion parameters."""
    batch_tokens: int = 8192
    """Most tokens of one optimiser step, over all its parts and all devices."""
    accumulate: int = 1
    """Parts that a device computes a step in, one after the other: more of them need less memory."""
    max_length: int = 2048
    """Tokens of the longest sequence; plain text is cut into pieces, conversations lose what comes later."""
    draft_vocab_size: int | None = None
    """eagle3: tokens that can be drafted, the most frequent ones; None: 32000, or all of a smaller vocabulary."""
    ttt_steps: int | None = None
    """eagle3: steps of its training-time test; None: 7."""
    cluster: str | None = None
    """Emulated cluster that the speed-up is estimated for; None: it is not."""
    device: str = "cpu"
    dtype: str = "float32"
    """The target's and of its cached states; bfloat16 also has the drafter compute in it. Its weights stay float32."""
    seed: int = 0
    save_every: int = 100
    """Steps between two saved states, each with figures on held-out data."""
    restart: bool = False
    """Begin anew where the output folder holds a run. The target's hidden states are kept: their name tells of what."""
    regenerate: bool = False
    """Let the target write the conversations' answers anew."""

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise FieldError(name, f"is {getattr(self, name)!r}; {nearest(getattr(self, name), known)}")
        check(bool(self.data), "data", "", "at least one file or folder")
        check_positive(self, "epochs", "max_steps", "learning_rate", "accumulate", "draft_vocab_size", "ttt_steps")
        check_positive(self, "save_every")
        check(self.max_length >= SHORTEST, "max_length", self.max_length, f"at least {SHORTEST}")
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        for name in ("draft_vocab_size", "ttt_steps"):
            if getattr(self, name) is not None and self.kind != "eagle3":
                raise FieldError(name, f"belongs to eagle3, not {self.kind}; remove it")
        least = self.max_length * self.accumulate
        check(
            self.batch_tokens >= least, "batch_tokens", self.batch_tokens, f"at least max_length x accumulate, {least}"
        )
        check(not self.output.is_file(), "output", str(self.output), "a folder, or a name that is still free")
