"""Greedy and sampled decoding with one drafter on the same texts, simulated: the effect of the temperature alone.

    python -m benchmarks.strategies.same_texts [RECORDING ...]

A greedy run and a sampled run write different texts, and how well a drafter knows the text matters more than how its
candidates are ranked. Here both decode the texts of a recording at T = 1, by default the demo pair's. Sampled decoding
is as recorded. For greedy decoding the target's token is the most probable one of the recorded distribution, the
drafter's candidates are its most probable ones, and the text goes on as recorded. Outputs that loop are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import MOST_TOKENS, recording
from penstock.cluster import load_cluster
from penstock.config import check
from penstock.core import ConfigError
from penstock.lab.acceptance import noise_ranked
from penstock.lab.record import NO_TOKEN, Recording, load_recordings
from penstock.lab.report import paired_ratio
from penstock.lab.script import Script, recording_script
from penstock.lab.simulate import straight_requests
from penstock.lab.simulator import simulate
from penstock.speculation import SpeculativeConfig

CLUSTERS = ("pipedec-14x3090", "flowspec-7b")
STRATEGIES: dict[str, dict[str, Any]] = {
    "pipedec[width=1,children=1]": {"strategy": "pipedec", "width": 1, "children": 1},
    "pipedec[width=4,children=4]": {"strategy": "pipedec", "width": 4, "children": 4},
    "pipedec": {"strategy": "pipedec"},
    "static_tree[tree_size=48]": {"strategy": "static_tree", "tree_size": 48},
    "flowspec": {"strategy": "flowspec"},
    "auto": {"strategy": "auto"},
}
CANDIDATES = (1, 4, 16)


def greedy(recorded: Recording) -> Recording:
    """The same contexts with the pick of greedy decoding and the drafter's candidates for it."""
    count = recorded.candidates.shape[1]
    ids, probs = recorded.draft_ids[:, :count], recorded.draft_probs[:, :count]
    with np.errstate(divide="ignore"):
        chances = np.where(ids == NO_TOKEN, -np.inf, np.log(probs)).astype(np.float32)
    return replace(recorded, tokens=recorded.target_ids[:, 0], candidates=ids, chances=chances)


def hits(recorded: Recording, requests: Sequence[int]) -> list[float]:
    """Fractions of tokens among the best 1, 4 and 16 candidates."""
    rows = np.concatenate([np.arange(rows.start, rows.stop) for rows in map(recorded.rows, requests)])
    shares = noise_ranked(recorded.tokens[rows], recorded.candidates[rows], max(CANDIDATES)).mean(axis=0)
    return [float(shares[k - 1]) for k in CANDIDATES]


def script_of(recorded: Recording, requests: Sequence[int], label: str) -> Script:
    return recording_script([(recorded, request) for request in requests], MOST_TOKENS, label)


def measured(files: Sequence[str]) -> dict[str, Any]:
    """Fractions of hits at both temperatures, and speed at T = 1 over T = 0 by cluster and strategy, for each
    recording."""
    found = {}
    for file, sampled in zip(files, load_recordings([Path(file) for file in files], None, None), strict=True):
        check(sampled.header.temperature > 0, "RECORDING", file, "one at a temperature above 0")
        requests = straight_requests(sampled)
        both = (greedy(sampled), sampled)
        scripts = [script_of(one, requests, file) for one in both]
        found[Path(file).stem] = {
            "tokens": scripts[0].tokens,
            "hits": [hits(one, requests) for one in both],
            "clusters": {cluster: compared(cluster, scripts) for cluster in CLUSTERS},
        }
    return found


def compared(cluster: str, scripts: Sequence[Script]) -> dict[str, list[float | None]]:
    found = {}
    for name, options in STRATEGIES.items():
        config = SpeculativeConfig(method="synthetic", accuracy=(1.0,), **options)
        greedily, sampled = ([run.seconds for run in simulate(load_cluster(cluster), one, config)] for one in scripts)
        ratio = paired_ratio([one / other for one, other in zip(greedily, sampled, strict=True) if other])
        assert ratio is not None
        found[name] = [ratio.mean, ratio.low, ratio.high]
    return found


def main(files: Sequence[str]) -> None:
    for name, found in measured(files or [str(ROOT / recording("T1"))]).items():
        print(f"{name}: {found['tokens']} tokens")
        for temperature, shares in zip(("T = 0", "T = 1"), found["hits"], strict=True):
            print(f"  {temperature}: " + ", ".join(f"{s:.1%} at {k}" for k, s in zip(CANDIDATES, shares, strict=True)))
        for cluster, ratios in found["clusters"].items():
            for strategy, (mean, low, high) in ratios.items():
                print(f"  {cluster:16} {strategy:28} T=1 over T=0 {mean:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"same_texts: error: {error}")
