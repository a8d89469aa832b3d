"""Digests of logits by format of weights, for processes that compile for processors of other kinds.

python -m tests.unit.models.compiled.digests CHECKPOINT FORMAT ...
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.models.compiled.dot import features, instruction
from tests.staged import Staged, chain_rows
from tests.unit.models.compiled.formats import FORMATS

TOKENS = [17, 3, 99, 42, 8, 64, 120, 11, 12, 13, 14]


def digests(checkpoint: Path, formats: Sequence[str]) -> list[str]:
    """A digest for each format of its ``logits``."""
    found = (logits(checkpoint, FORMATS[name]) for name in formats)
    return [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in found]


def logits(checkpoint: Path, options: dict[str, str]) -> Tensor:
    """The logits of a prompt's rows and of a row behind it."""
    staged, count = Staged(checkpoint, 1, **options), len(TOKENS)
    prompt = staged.run(chain_rows(0, TOKENS, range(count)), range(count), opened=[0])
    return torch.cat([prompt, staged.run(chain_rows(0, [5], [count], count, count - 1), [0])])


if __name__ == "__main__":
    print(instruction(), "avx512bf16" in features(), *digests(Path(sys.argv[1]), sys.argv[2:]))
