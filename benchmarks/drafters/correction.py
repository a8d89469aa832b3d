"""In-flight correction on and off, simulated: what a drafter is worth that knows more of a node half-way through.

    python -m benchmarks.drafters.correction [REQUESTS]

The strategy's own code, in virtual time. The drafter's first answers follow the profile of `auto_against.py`. Once a
node has passed half of the stages the drafter may correct it. What it has learned is a hint: with chance ``sharpness``
the target's token, else a token drawn from the first answer's own chances, and it does not know which. Its corrections
are the chances given the hint, by Bayes,

    p'(token) = sharpness * [token is the hint] + (1 - sharpness) * p(token)

so it is as calibrated as the first answer was. A hint may name a token that was no candidate, and may lead astray where
the first answer was right. Off the target's path hints are drawn from the first answer's chances, as the target's
token is on it.

"again" is how often the correction's best is right where the first answer's best was wrong, "kept" where it was right.
"""

from __future__ import annotations

import math
import random
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import paired
from benchmarks.shared.profile import ACCURACY
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.drafters.base import Draft, DraftRequest
from penstock.emulation.cluster import EmulatedDrafter
from penstock.lab.script import MISSED, Script, profile_script
from penstock.lab.simulator import ScriptedDrafter, make_loop, simulate_one
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig, make_strategy
from penstock.tree import Node

NAME, HOW = "correction", "Simulated, with the synthetic profile"
STRATEGY = "continuous"
CLUSTERS = ("spd-8", "pipedec-14x3090")
"""Clusters whose first stage and drafter are used: one drafter as slow as a stage, and one three times as fast."""
STAGES = (4, 8, 14, 16)
SHARPNESS = (0.15, 0.25, 0.4, 0.55, 0.7, 0.82, 0.87, 1.0)
TOKENS = 100
OTHER = MISSED + 1
"""A token that is neither a candidate of the first answer nor the target's."""

Answer = list[tuple[int, float]]


class CorrectingDrafter(ScriptedDrafter):
    """Corrects, once each, the ancestors of nodes that it is asked about, once they have passed half of the stages."""

    def __init__(self, script: Script, stages: int, sharpness: float) -> None:
        super().__init__(script)
        self._half = stages // 2
        self._sharpness = sharpness

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        rows = super().ask(asks)
        corrections = [
            Draft(node, self._correction(ask.request, node)[: ask.count])
            for ask in asks
            if ask.corrects
            for node in above(ask.nodes)
            if node.candidates and not node.earlier and node.entered and ask.stream - node.stream >= self._half
        ]
        self._answers += corrections
        return rows + len(corrections)

    def _correction(self, request: Request, node: Node) -> Answer:
        number, script = request.number, self._script
        off_path = self._off_path[number].get(node.id)
        truth = script.after(number, node.position) if off_path is None else None
        rng = random.Random(hash((number, node.position, off_path or 0)))
        chances = [
            math.exp(chance) for _, chance in self._draft(request, node, len(script.pool[0]), 0).candidates or ()
        ]
        return corrected(chances, hint(chances, truth, self._sharpness, rng), self._sharpness)


def above(nodes: Sequence[Node]) -> list[Node]:
    """The nodes' ancestors in the tree."""
    found: dict[int, Node] = {}
    for node in nodes:
        current = node.parent
        while current is not None and current.id not in found:
            found[current.id] = current
            current = current.parent
    return list(found.values())


def hint(chances: Sequence[float], truth: int | None, sharpness: float, rng: random.Random) -> int:
    """The token that the drafter is led to by its later knowledge."""
    drawn = bisect_right(list(accumulate(chances)), rng.random())
    is_right = rng.random() < sharpness
    if is_right and truth is not None:
        return truth
    return drawn if drawn < len(chances) else OTHER


def corrected(chances: Sequence[float], hinted: int, sharpness: float) -> Answer:
    """Candidates and their log chances given the hint, best first."""
    after = {token: (1 - sharpness) * chance for token, chance in enumerate(chances)}
    after[hinted] = after.get(hinted, 0.0) + sharpness
    ranked = sorted(after.items(), key=lambda entry: -entry[1])
    return [(token, math.log(chance)) for token, chance in ranked if chance]


@dataclass(frozen=True)
class Figures:
    """Speed with corrections over speed without, and of the latter over plain decoding, by request."""

    gains: list[float]
    before: list[float]


def seconds(cluster: Cluster, script: Script, config: SpeculativeConfig | None, sharpness: float) -> list[float]:
    """Seconds per request from its first token to its last; the first request also runs once before, uncounted."""
    script = script.with_again(0, script.tokens // len(script.picks))
    loop, stages = make_loop(cluster, script, config), len(cluster.stages)
    if isinstance(loop.drafter, EmulatedDrafter):
        loop.drafter.inner = CorrectingDrafter(script, stages, sharpness)
    last = len(script.picks) - 1
    runs = [simulate_one(loop, script, number, make_strategy(config, stages)) for number in (last, *range(last))]
    return [run.seconds for run in runs[1:]]


def speculating(strategy: str, corrects: bool) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="synthetic",
        accuracy=ACCURACY,
        strategy=strategy,
        in_flight_correction=corrects,
    )


def accuracies(script: Script, sharpness: float) -> tuple[float, float]:
    """How often a correction's best is right where the first answer's best was wrong, and where it was right."""
    rng, counts = random.Random(0), {False: [0, 0], True: [0, 0]}
    for picks, drafts in zip(script.picks, script.drafts, strict=True):
        for pick, index in zip(picks, drafts, strict=True):
            chances = [math.exp(chance) for chance in script.pool[index]]
            best = corrected(chances, hint(chances, pick, sharpness, rng), sharpness)[0][0]
            counts[pick == 0][0] += 1
            counts[pick == 0][1] += best == pick
    return counts[False][1] / counts[False][0], counts[True][1] / counts[True][0]


def measured(name: str, requests: int) -> dict[str, Any]:
    """`continuous` over plain decoding by number of stages, and the gain of corrections by sharpness, rounded."""
    script = profile_script(ACCURACY, requests, TOKENS, seed=0)
    clusters = [uniform_cluster(load_cluster(name), stages) for stages in STAGES]
    plain = [seconds(cluster, script, None, 0.0) for cluster in clusters]
    off = [seconds(cluster, script, speculating(STRATEGY, False), 0.0) for cluster in clusters]
    rows = []
    for sharpness in SHARPNESS:
        again, kept = accuracies(script, sharpness)
        cells = []
        for cluster, without in zip(clusters, off, strict=True):
            on = seconds(cluster, script, speculating(STRATEGY, True), sharpness)
            ratio = paired(without, on)
            assert ratio.low is not None
            assert ratio.high is not None
            cells.append([round(ratio.mean, 3), round(ratio.low, 2), round(ratio.high, 2)])
        rows.append({"again": round(again, 2), "kept": round(kept, 2), "ratios": cells})
    over_plain = [round(sum(one) / sum(other), 2) for one, other in zip(plain, off, strict=True)]
    return {"stages": STAGES, "over_plain": over_plain, "corrected": rows}


if __name__ == "__main__":
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    figures = {name: measured(name, requests) for name in CLUSTERS}
    Benchmark(__file__, HOW).keep(figures, str(requests))
    show(figures)
