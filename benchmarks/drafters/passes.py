"""Milliseconds of a drafter's pass, and of a refill, with the drafters of ``like_for_like``.

    python -m benchmarks.drafters.passes WORK [--updates 1000] [--prompts 6] [--tokens 48]

WORK has the drafters that ``like_for_like`` trained; the first seed's are measured. Trees are drafted and verified one
after the other. A refill is all that the drafter computes from an ask about the root alone, as after a token that no
draft had, until the tree has its levels: a pass for each with a chain's drafter, one for all with a block's, and one
and a row of the Markov head for each asked node with DSpark's and Headrace's. A pass counts with the processor time
that it takes on one core here. Held-out code, T = 0. Nothing else may run on the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks.drafters.like_for_like import CLUSTER, DEPTH, RECIPES, folder_of
from benchmarks.papers.drafter_time import TimedExecutor
from benchmarks.shared import virtual
from penstock import LLM
from penstock.lab.bench.comparison import decode
from penstock.speculation import parse_speculative

HOW: Final = "Measured, the demo target's drafters on one core"
TREE: Final = 64
"""Nodes of a tree. Each level but the root's is drafted for as many nodes as may have a child in it."""
SIZES: Final = virtual.Sizes(prompts=6, tokens=48)


def measured(method: str, folder: Path, sizes: virtual.Sizes) -> dict[str, float]:
    """The medians of a root's pass, and of the passes and milliseconds of a refill."""
    torch.set_num_threads(1)
    options = {"strategy": "static_tree", "tree_size": TREE, "tree_depth": DEPTH}
    config, host = parse_speculative({"method": method, "model": str(folder), **options}), TimedExecutor()
    with LLM(host=host, cluster=CLUSTER, speculative_config=config, enable_prefix_caching=False) as llm:
        (watch,) = host.watches
        questions = virtual.asked(sizes, (0.0,))
        decode(llm, [questions[0].prompt], [questions[0].params], config)  # a process's first passes are slower
        watch.taken.clear()
        for one in questions:
            decode(llm, [one.prompt], [one.params], config)
    found = refills([entry for entry in watch.taken if entry[0]])
    return {
        "pass_ms": round(1e3 * median(passes[0] for passes in found), 3),
        "passes": median(map(len, found)),
        "refill_ms": round(1e3 * median(map(sum, found)), 3),
        "refills": len(found),
    }


def refills(taken: Sequence[tuple[int, float]]) -> list[list[float]]:
    """The seconds of the passes of each refill; ``taken`` are (nodes asked about, seconds) of all passes.

    Passes after the last level make a tree grow on from nodes that it still has.
    """
    begins = [place for place, (asked, _) in enumerate(taken) if asked == 1]
    ends = [*begins[1:], len(taken)]
    return [
        [seconds for _, seconds in taken[begin : min(end, begin + DEPTH)]]
        for begin, end in zip(begins, ends, strict=True)
    ]


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    asked: argparse.Namespace = wanted.options
    for name, (method, _) in RECIPES.items():
        yield name, partial(measured, method, asked.work / folder_of(name, asked.updates, 0), wanted.sizes)


if __name__ == "__main__":
    virtual.main(
        __file__,
        cases,
        how=HOW,
        sizes=SIZES,
        given=lambda asked: f"WORK --updates {asked.updates}",
        work=Path,
        updates=1000,
    )
