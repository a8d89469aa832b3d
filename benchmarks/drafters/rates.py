"""Other learning rates for the drafters of ``like_for_like``.

    python -m benchmarks.drafters.rates DATA WORK [--updates 1000] [--seeds 1] [--only "NAME at RATE" ...]

A recipe is trained at one of ``RATES`` that is not its own, and looked at as there: held-out tokens at T = 0, with 0 to
4 tokens in flight. No drafter shall stand behind because of a rate that suits another one. A case that is in
benchmarks/measured/drafters/rates.json is not measured again with as many updates.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Final

import torch
from rich.console import Console

from benchmarks.drafters.like_for_like import RECIPES, known, main, options_of, with_states
from benchmarks.shared import virtual
from penstock.lab.trainer.run import run_train

HOW: Final = "Measured, with the demo target"
RATES: Final = (6e-3, 3e-3, 2e-3, 1e-3)
CASES: Final = {f"{name} at {rate:g}": (name, rate) for rate in RATES for name in RECIPES}


def measured(asked: argparse.Namespace, _: virtual.Sizes, case: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    name, rate = CASES[case]
    output = with_states(asked.work, f"rate {case}-{asked.updates}-{seed}".replace(" ", "-"))
    options = replace(options_of(asked, name, seed), learning_rate=rate, output=output)
    return {"name": name, "rate": rate, "in_flight": known(options, run_train(options, Console(quiet=True)))}


if __name__ == "__main__":
    main(__file__, measured, HOW, updates=1000, names=tuple(CASES))
