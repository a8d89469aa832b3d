"""Families of models, as small random checkpoints: every strategy's tokens beside those of transformers' ``generate``.

    python -m benchmarks.strategies.families [NAME ...] [--runs N]

Names are those of ``tests/checkpoints.py`` and ``tests/relatives.py``; all of them by default. A checkpoint is compared

- with every strategy, over 1, 3 and 5 stages and with one layer to a stage, at T = 0 and 1;
- with a prompt of 100 tokens in chunks of 1 to 100, over three stages;
- with four requests over slots for little more than two, which share prefixes and give way to each other;
- with the same four where slots that no later row reaches are given back.

A synthetic drafter that is wrong in 40% of its first choices drafts. Each run is written to
benchmarks/measured/strategies/families.json as it ends, and not repeated while it is there; it ends with an
AssertionError where a token differs though the reference is not undecided.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.measured import kept_figures
from penstock.checkpoint.checkpoint import open_checkpoint
from tests.checkpoints import ARCHITECTURES, FURTHER, RECURRENT, UNUSUAL, make_checkpoint, settings_of
from tests.exactness import compare_chunks, compare_crowded, compare_strategies, every_pair
from tests.relatives import RELATIVES

NAME, HOW = "families", "In virtual time, with small random checkpoints and the synthetic drafter"
ALL: Final = (*ARCHITECTURES, *FURTHER, *RECURRENT, *UNUSUAL, *RELATIVES)
STAGES: Final = (1, 3, 5)
CHUNKS: Final = (1, 2, 3, 7, 16, 50, 100)
CALM: Final = 0.2
"""Standard deviation of weights that is so small that rounding decides no token of a long text."""


def compared(name: str) -> dict[str, Any]:
    """The counts of each comparison of a checkpoint."""
    with tempfile.TemporaryDirectory() as wide, tempfile.TemporaryDirectory() as calm:
        target = make_checkpoint(Path(wide), name)
        layers = open_checkpoint(str(target)).num_layers
        strategies = compare_strategies(target, every_pair(sorted({*STAGES, layers})))
        longer = make_checkpoint(Path(calm), name, initializer_range=CALM)
        counted = {
            "strategies": strategies,
            "chunks": compare_chunks(longer, CHUNKS),
            "crowded": compare_crowded(longer, gives_back=False)[0],
            "gives_back": compare_crowded(longer, gives_back=True)[0],
        }
    return {"family": settings_of(name)["model_type"], **{kind: asdict(one) for kind, one in counted.items()}}


def runs(benchmark: Benchmark, names: Sequence[str]) -> Iterator[str]:
    """Compare the remaining checkpoints; each result is stored before it is yielded."""
    figures = kept_figures(NAME)
    for name in names:
        if name not in figures:
            figures[name] = compared(name)
            benchmark.keep(figures)
            yield f"{name}: {figures[name]}"


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    names = {"nargs": "*", "choices": [*ALL, []], "metavar": "NAME"}
    at_once = {"type": int, "default": None, "help": "compare so many of those that are left, and go on another time"}
    options = benchmark.parser(names=names, runs=at_once).parse_args()
    for line in islice(runs(benchmark, options.names or ALL), options.runs):
        print(line, flush=True)
