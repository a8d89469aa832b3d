"""Hostile checkpoints, requests, frames, and kills, again and again: what fails, and what repeats it.

    python -m benchmarks.load.attack --minutes N --seed S [--only KIND [--first I] [--attempts N]]

Every kind has its share of the time. An attempt fails where something hangs, a token is wrong, an error is raw or
untyped, a checkpoint's code runs, or processes or descriptors are left behind. Each failure is printed with the kind
and the attempt, which ``--only KIND --first I --attempts 1`` repeats. The exit code is 1 if anything has failed.

``--only memory --attempts 10`` makes ten thousand requests of one server, and prints what its processes hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from benchmarks.load.attacking import bodies, checkpoints, frames, grammars, heads, kills, memory
from benchmarks.load.attacking.trying import Start, Trial, Tried

NAME: Final = "attack"
ATTACKS: Final[Mapping[str, Start]] = {
    "bodies": bodies.attacked,
    "heads": heads.attacked,
    "grammars": grammars.attacked,
    "checkpoints": checkpoints.attacked,
    "strangers": partial(frames.attacked, "strangers", "ipc"),
    "strangers-tcp": partial(frames.attacked, "strangers", "tcp"),
    "insiders": partial(frames.attacked, "insiders", "ipc"),
    "insiders-tcp": partial(frames.attacked, "insiders", "tcp"),
    "kills": kills.attacked,
    "memory": memory.attacked,
}


def lines(found: list[Tried]) -> list[str]:
    rows = []
    for one in found:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(one.outcomes.items()))
        rows.append(
            f"{one.kind:14} {one.outcomes.total():7} in {one.seconds:5.0f} s, {len(one.faults)} failed: {outcomes}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=list(ATTACKS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--attempts", type=int)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kinds = [given.only] if given.only else list(ATTACKS)
    print(f"seed {given.seed}", flush=True)
    share = 60 * given.minutes / len(kinds)
    found = [Trial(kind, ATTACKS[kind], given.seed, given.first).run(share, given.attempts) for kind in kinds]
    print(*lines(found), sep="\n")
    return 1 if any(one.faults for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
