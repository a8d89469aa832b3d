"""Digests of logits by format of weights, for processes that compile for processors of other kinds.

python -m tests.unit.models.compiled.digests CHECKPOINT
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from penstock.models.compiled.dot import features, instruction
from tests.staged import Staged, chain_rows
from tests.unit.models.compiled.formats import FORMATS

TOKENS = [17, 3, 99, 42, 8, 64, 120, 11, 12, 13, 14]


def digests(checkpoint: Path) -> list[str]:
    """A digest for each format, of the logits of a prompt's rows and of a row behind it."""
    found = []
    for options in FORMATS.values():
        staged, count = Staged(checkpoint, 1, **options), len(TOKENS)
        prompt = staged.run(chain_rows(0, TOKENS, range(count)), range(count), opened=[0])
        more = staged.run(chain_rows(0, [5], [count], count, count - 1), [0])
        found.append(hashlib.sha256(prompt.numpy().tobytes() + more.numpy().tobytes()).hexdigest())
    return found


if __name__ == "__main__":
    print(instruction(), "avx512bf16" in features(), *digests(Path(sys.argv[1])))
