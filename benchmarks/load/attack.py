"""Hostile checkpoints, requests, frames, and kills, again and again: what fails, and what repeats it.

    python -m benchmarks.load.attack --minutes N --seed S [--only KIND [--first I] [--attempts N]] [--store]

Every kind has its share of the time. An attempt fails where something hangs, a token is wrong, an error is raw or
untyped, a checkpoint's code runs, or processes or descriptors are left behind. Each failure is printed with the kind
and the attempt, which ``--only KIND --first I --attempts 1`` repeats. The exit code is 1 if anything has failed.

``--store`` keeps what was found in benchmarks/measured/load/attack.json, in place of what is there of the same kinds.

``--only memory --attempts 10`` makes ten thousand requests of one server, and prints what its processes hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from benchmarks.load.attacking import (
    bodies,
    callers,
    checkpoints,
    connections,
    frames,
    grammars,
    heads,
    kills,
    memory,
    sites,
    tokenizers,
)
from benchmarks.load.attacking.trying import Start, Trial, Tried
from benchmarks.shared.benchmark import show
from benchmarks.shared.measured import kept_figures, store

NAME: Final = "attack"
HOW: Final = "Measured, with the demo pair"
ATTACKS: Final[Mapping[str, Start]] = {
    "bodies": bodies.attacked,
    "heads": heads.attacked,
    "connections": connections.attacked,
    "grammars": grammars.attacked,
    "sites": sites.attacked,
    "callers": callers.attacked,
    "tokenizers": tokenizers.attacked,
    "checkpoints": checkpoints.attacked,
    "strangers": partial(frames.attacked, "strangers", "ipc"),
    "strangers-tcp": partial(frames.attacked, "strangers", "tcp"),
    "strangers-tls": partial(frames.attacked, "strangers", "tcp", tls=True),
    "insiders": partial(frames.attacked, "insiders", "ipc"),
    "insiders-tcp": partial(frames.attacked, "insiders", "tcp"),
    "insiders-tls": partial(frames.attacked, "insiders", "tcp", tls=True),
    "kills": kills.attacked,
    "memory": memory.attacked,
}


def figures_of(found: Tried, seed: int, minutes: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "minutes": minutes,
        "tried": found.outcomes.total(),
        "seconds": found.seconds,
        "outcomes": dict(sorted(found.outcomes.items())),
        "faults": [f"{which}: {what.strip().splitlines()[-1][:300]}" for which, what in found.faults],
    }


def commands_of(figures: dict[str, Any]) -> list[str]:
    return [
        f"python -m benchmarks.load.attack --only {kind} --minutes {one['minutes']:g} --seed {one['seed']} --store"
        for kind, one in figures.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=list(ATTACKS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--attempts", type=int)
    parser.add_argument("--store", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kinds = [given.only] if given.only else list(ATTACKS)
    print(f"seed {given.seed}", flush=True)
    share = given.minutes / len(kinds)
    found = [Trial(kind, ATTACKS[kind], given.seed, given.first).run(60 * share, given.attempts) for kind in kinds]
    figures = {one.kind: figures_of(one, given.seed, share) for one in found}
    show(figures)
    if given.store:
        kept = kept_figures(NAME) | figures
        together = {kind: kept[kind] for kind in ATTACKS if kind in kept}
        store(NAME, HOW, (commands_of(together), together))
    return 1 if any(one.faults for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
