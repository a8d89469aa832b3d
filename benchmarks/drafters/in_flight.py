"""Block drafters over deep pipelines, simulated with published acceptance by position.

    python -m benchmarks.drafters.in_flight [--requests 16] [--tokens 150]

EAGLE-3, DFlash and DSpark of Qwen3-8B, trained alike, on chats at T = 1 (arXiv 2607.05147): how often the token at each
place of a chain is right, if all before it are. In a chain this favours late places, because a chain gets that far
where the text is easy. In a full pipeline all tokens are far from the last one whose states are known, the difficult
ones, too. A text's easy and difficult stretches are therefore part of the script, and each place has the share of all
tokens with which chains come out as published (``share_of_all``).

A drafter that cannot make use of the tokens in flight has the share of its place behind the last known token. One that
is shown them has that of the first place. The published modules were not trained with tokens in flight;
``like_for_like`` measures the demo target's, of which some were.

A chain of seven tokens, drafted and verified by turns, is what vLLM and SGLang do; `auto` keeps the pipeline full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import bounded
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.spec import Link, ModelPrice, eagle
from penstock.lab.grid import PLAIN, parse_entries
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import simulate

HOW: Final = "Simulated, with published acceptance by position"
CHAIN: Final = "static_tree[tree_size=7,tree_depth=7,children=1]"
ENTRIES: Final = (PLAIN, CHAIN, "auto")
BLOCK: Final = 7
"""Tokens of the paper's blocks (its section 4.1)."""
CANDIDATES: Final = 16
EXPONENT: Final = 0.5
"""The share of tokens that are not among the best k candidates falls as k to the power of minus this, which is between
the exponents of the demo target's EAGLE-3 (0.42) and of its DSpark (0.53), from one candidate to four."""


@dataclass(frozen=True)
class Drafter:
    """``in_chains[i]``: how often the token at place i of a chain is right, if all before it are.

    ``layers`` of the target's shape make a pass, which drafts ``block`` levels.
    """

    in_chains: tuple[float, ...]
    layers: int
    block: int


def line(first: float, last: float) -> tuple[float, ...]:
    return tuple(first + (last - first) * i / (BLOCK - 1) for i in range(BLOCK))


DRAFTERS: Final[Mapping[str, Drafter]] = {
    "EAGLE-3": Drafter((0.53, 0.67, 0.72, 0.735, *[0.74] * 3), layers=1, block=1),
    "DFlash": Drafter(line(0.72, 0.63), layers=5, block=BLOCK),
    "DSpark": Drafter((0.72, *[0.783] * (BLOCK - 1)), layers=5, block=BLOCK),
}
"""The paper states EAGLE-3's first and last place, and DFlash's. Between these DFlash's are on a straight line, which
comes to its tokens a round on MT-Bench (3.11), and EAGLE-3's rise as they have to for theirs (2.66). DSpark's first
place is DFlash's, whose backbone it has, and all others have the share that gives its tokens a round (3.72)."""
PERSISTENCE: Final = 0.95
"""Chance that a token is as easy as the one before it. With it EAGLE-3's share of all tokens falls by 15% from the
first place to the fifth, the demo target's by 19% (0.45 to 0.36, ``like_for_like``); with 0.8 it would hardly fall."""
SAMPLE: Final = (60, 600)
"""Requests and tokens on which shares are fitted. Since easy tokens come in stretches, the standard error of a share of
all these 36,000 is about 0.009, and that of late places in chains is larger."""
HALVINGS: Final = 8
"""Steps of the search for a share, which end within 0.004 of it."""
FAR: Final = Link(bandwidth_gbit_s=1.0, latency_ms=30.0)
LAYER_MS: Final = 1.04
"""Milliseconds that a layer takes on the GPUs of the spd presets: a quarter of their module of four layers."""


def clusters() -> Iterator[tuple[str, Cluster]]:
    """Four, eight and fourteen stages; then the first two with a host for every stage and 30 ms between them."""
    near = {name: load_cluster(name) for name in ("spd-4", "spd-8", "pipedec-14x3090")}
    yield from near.items()
    for name in ("spd-4", "spd-8"):
        apart = tuple(replace(device, host=device.name) for device in near[name].devices)
        yield f"{name}, 30 ms apart", replace(near[name], devices=apart, links=replace(near[name].links, network=FAR))


def with_drafter(cluster: Cluster, layers: int) -> Cluster:
    """The cluster with a drafter of so many layers: as measured where the cluster says, else by its price."""
    assert cluster.as_model is not None
    if cluster.draft_pass_ms is not None:
        return replace(cluster, draft_pass_ms=LAYER_MS * layers)
    return replace(cluster, draft_as_model=price(cluster.as_model, layers))


def price(target: ModelPrice, layers: int) -> ModelPrice:
    """A drafter of so many layers of the target's shape behind a projection of as many of its states."""
    return replace(eagle(target), layers=layers)


def profile(right: float) -> list[float]:
    return [1 - (1 - right) * k**-EXPONENT for k in range(1, CANDIDATES + 1)]


def script_of(shares: Sequence[float], requests: int, tokens: int) -> Script:
    first, *further = map(profile, shares)
    return profile_script(first, requests, tokens, seed=0, further=further, persistence=PERSISTENCE)


def last_in_chains(shares: Sequence[float]) -> float:
    """How often the token at the last of these places is right, in chains in which all before it are."""
    script = script_of(shares, *SAMPLE)
    right = [np.array(ranks) == 0 for ranks in (script.picks, *(slot.ranks for slot in script.further))]
    begins = SAMPLE[1] - len(right) + 1
    here = [one[:, place : place + begins] for place, one in enumerate(right)]
    before = np.logical_and.reduce([np.ones_like(here[0]), *here[:-1]])
    return float((before & here[-1]).sum() / before.sum())


def share_of_all(in_chains: Sequence[float]) -> list[float]:
    """How often the token of each place is right over all tokens, where chains come out as ``in_chains`` says."""
    shares = [in_chains[0]]
    for wanted in in_chains[1:]:
        low, high = 0.0, in_chains[0]  # a token is not easier to tell from further away
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if last_in_chains([*shares, middle]) < wanted else (low, middle)
        shares.append((low + high) / 2)
    return shares


def measured(requests: int, tokens: int) -> dict[str, Any]:
    """Each drafter's shares, and the speed over plain decoding of every entry, by cluster and drafter."""
    shares = {name: share_of_all(drafter.in_chains) for name, drafter in DRAFTERS.items()}
    rows = []
    for name, cluster in clusters():
        for method, drafter in DRAFTERS.items():
            for shown in (False, True) if drafter.block > 1 else (False,):
                script = script_of(shares[method], requests, tokens)
                script = replace(script, block=drafter.block, shows_in_flight=shown)
                row = {"cluster": name, "stages": len(cluster.stages), "drafter": method, "shown": shown}
                rows.append(row | {"over_plain": ratios(with_drafter(cluster, drafter.layers), script)})
                show(rows[-1])
    stated = {
        name: {
            "in_chains": [round(one, 3) for one in drafter.in_chains],
            "of_all": [round(one, 3) for one in shares[name]],
            "fitted": [round(last_in_chains(shares[name][:places]), 3) for places in range(1, BLOCK + 1)],
        }
        for name, drafter in DRAFTERS.items()
    }
    return {"drafters": stated, "rows": rows}


def ratios(cluster: Cluster, script: Script) -> dict[str, Any]:
    entries = parse_entries(ENTRIES, {})
    runs = {text: simulate(cluster, script, None if text == PLAIN else config) for text, config in entries}
    seconds = {text: [run.seconds for run in found] for text, found in runs.items()}
    return {text: bounded(seconds[PLAIN], one) for text, one in seconds.items() if text != PLAIN}


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    options = benchmark.parser(requests=16, tokens=150).parse_args()
    found = measured(options.requests, options.tokens)
    benchmark.keep(found, f"--requests {options.requests} --tokens {options.tokens}")
