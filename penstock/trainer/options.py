"""What ``penstock train`` is asked for; whatever can be refused without reading a file is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from penstock.config import FieldError, check, check_positive, nearest

KINDS: Final = ("eagle", "eagle3", "medusa", "spd", "early-exit", "draft")
BELONGS: Final = {
    "draft_vocab_size": ("eagle3", "medusa", "spd", "early-exit"),
    "ttt_steps": ("eagle3",),
    "heads": ("medusa",),
    "spec_layers": ("spd", "early-exit"),
    "variant": ("spd",),
    "anchors": ("spd",),
    "stages": ("spd",),
    "post_state": ("spd",),
    "exit_layer": ("early-exit",),
    "layers": ("draft",),
}
"""Options of some kinds only; where they are None the kind says what is usual."""
VARIANTS: Final = ("anchors", "paper")
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
    """Tokens that can be drafted, the most frequent ones; None: 32000, or all of a smaller vocabulary; medusa: all."""
    ttt_steps: int | None = None
    """eagle3: steps of its training-time test; None: 7."""
    heads: int | None = None
    """medusa: how many; None: 5."""
    spec_layers: int | None = None
    """spd, early-exit: the module's layers; None: 1."""
    variant: str | None = None
    """spd: "anchors", for any number of stages, or "paper", for one; None: "anchors"."""
    anchors: tuple[int, ...] | None = None
    """spd: the target's hidden states that features are made of; None: 0, 1, 2, 4, ... up to half, and the last."""
    stages: tuple[int, ...] | None = None
    """spd: numbers of pipeline stages to train for; None: 4, 8 and 16 as far as the target has so many layers."""
    post_state: bool = False
    """spd of the paper: a token is asked about once it has passed the first stage."""
    exit_layer: int | None = None
    """early-exit: the hidden state that it reads; None: a quarter of the layers."""
    layers: int | None = None
    """draft: the model's layers; None: 2."""
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
        check_positive(self, "save_every", "heads", "spec_layers", "exit_layer", "layers")
        check(self.max_length >= SHORTEST, "max_length", self.max_length, f"at least {SHORTEST}")
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        for name, kinds in BELONGS.items():
            if getattr(self, name) not in (None, False) and self.kind not in kinds:
                raise FieldError(name, f"belongs to {', '.join(kinds)}, not {self.kind}; remove it")
        self._check_spd()
        least = self.max_length * self.accumulate
        check(
            self.batch_tokens >= least, "batch_tokens", self.batch_tokens, f"at least max_length x accumulate, {least}"
        )
        check(not self.output.is_file(), "output", str(self.output), "a folder, or a name that is still free")

    def _check_spd(self) -> None:
        if self.variant is not None and self.variant not in VARIANTS:
            raise FieldError("variant", f"is {self.variant!r}; {nearest(self.variant, VARIANTS)}")
        for name in ("anchors", "stages"):
            given = getattr(self, name)
            rising = given is None or (bool(given) and all(one < other for one, other in pairwise(given)))
            check(rising, name, given, "a rising list of whole numbers")
        check(self.stages is None or self.stages[0] > 0, "stages", self.stages, "numbers above 0")
        begins = self.anchors is None or (self.anchors[0] == 0 and len(self.anchors) > 1)
        check(begins, "anchors", self.anchors, "0, what a token has that has passed no layer, and at least one more")
        if self.variant == "paper":
            if self.anchors is not None:
                raise FieldError("anchors", "belongs to variant anchors, not paper; remove it")
            found = "missing" if self.stages is None else f"{self.stages!r}"
            if self.stages is None or len(self.stages) != 1:
                raise FieldError("stages", f"is {found}; variant paper is trained for one number of stages, name it")
        elif self.post_state:
            raise FieldError("post_state", "belongs to variant paper, not anchors; remove it")


def whole_numbers(field: str, text: str | None) -> tuple[int, ...] | None:
    """Read "4,8,16". Raises FieldError for what is no such list."""
    try:
        return None if text is None else tuple(int(one) for one in text.split(","))
    except ValueError:
        raise FieldError(field, f"is {text!r}; it has to be a list of whole numbers, like 4,8,16") from None


def check_within(options: TrainOptions, last: int, *names: str) -> None:
    """Raise FieldError if one of these options says more than the target's ``last`` layers."""
    for name in names:
        given = getattr(options, name)
        if given is not None and (max(given) if isinstance(given, tuple) else given) > last:
            raise FieldError(name, f"is {given}; the target has {last} layers")
