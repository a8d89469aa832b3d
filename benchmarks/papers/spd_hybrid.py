"""SPD's tables with a target of the kind that the paper has: three of four layers are gated delta nets, as Qwen3.5's.

    python -m benchmarks.papers.spd_hybrid --spd build/hybrid/spd [--prompts 10] [--tokens 64]

The module's target lies beside it, as ``scripts/train_hybrid.py`` leaves both. Rows, trees, temperatures, lockstep and
presets are those of ``benchmarks.papers.spd_tables``, for the numbers of stages that the module was trained for. All in
virtual time.

Each row is written to benchmarks/measured/papers/spd_hybrid.json as it finishes. What is there with as many prompts and
tokens is not run again; remove the file after a change of the engine, the target or the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.papers.spd_tables import measured, methods
from benchmarks.shared import virtual
from penstock.checkpoint.checkpoint import open_checkpoint

NAME: Final = "spd_hybrid"
HOW: Final = "In virtual time, with a hybrid target"
STAGES: Final = (4, 8)


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    for folder in wanted.drafters["spd"]:
        beside = str(Path(folder).resolve().parent / "target")
        target = open_checkpoint(beside)
        for stages in STAGES:
            for method in methods("spd", folder, stages, target):
                yield method.key, partial(measured, method, wanted.sizes, beside)


if __name__ == "__main__":
    virtual.main(__file__, cases, ("spd",), HOW)
