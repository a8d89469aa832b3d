"""SPD's module for one number of stages beside one for all, and EAGLE-3 trained by small steps: acceptance lengths.

    python -m benchmarks.papers.spd_recipes --spd DIR ... --eagle3 DIR ... [--prompts 10] [--tokens 64]

L' in ideal lockstep, as ``benchmarks.papers.spd_tables`` takes it, of every folder over 4 and 8 stages; a module for
one number of stages over that one alone. Folders are known by their names. All in virtual time.

Each row is written to benchmarks/measured/papers/spd_recipes.json as it finishes. What is there with as many prompts
and tokens is not run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.spd_tables import TEMPERATURES, TOP_K, Method, in_lockstep, methods
from benchmarks.shared import virtual
from penstock.checkpoint.checkpoint import open_checkpoint

NAME: Final = "spd_recipes"
STAGES: Final = (4, 8)


def measured(method: Method, sizes: virtual.Sizes) -> dict[str, Any]:
    """L' by temperature and width."""
    questions = virtual.asked(sizes, TEMPERATURES, TOP_K)
    found = {cell: run for cell, (run,) in in_lockstep(method, questions).items()}
    return {
        "method": method.name,
        "stages": method.stages,
        "layers": method.layers,
        "lengths": {cell: run.equivalent_acceptance_length for cell, run in found.items()},
        "identical": all(run.identical_to_autoregressive for run in found.values()),
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    target = open_checkpoint(virtual.TARGET)
    for name, folders in wanted.drafters.items():
        for folder in folders:
            for stages in STAGES:
                for method in methods(name, folder, stages, target):
                    if not method.output_states:
                        yield f"{Path(folder).name} n={stages}", partial(measured, method, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, ("spd", "eagle3"))
