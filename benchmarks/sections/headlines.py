"""The first page's row for each section: the question, and the figure that answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.costs import spd_overhead
from benchmarks.load.chaos import together
from benchmarks.papers import flowspec as flowspec_paper
from benchmarks.sections import jupiter
from benchmarks.sections.pipedec import WIDE
from benchmarks.shared.simulations import find
from benchmarks.strategies.shared_host import ratio_over
from penstock.lab.common import times

Headline = tuple[str, str]
"""A question, as the head of a row, and its figure."""


def exactness(figures: Any) -> Headline:
    return "tokens beside transformers' `generate`, and across strategies", figures[0]["result"]


def overhead(figures: Any) -> Headline:
    run = next(run for run in figures if run["strategy"] == "auto")
    over = run["ms"] / run["modelled_ms"] - 1
    return "time that engine and messages add to a step of 10 ms, 14 stages", f"{over:.1%}"


def beside_peers(figures: Any) -> Headline:
    ratios = next(iter(figures.values()))["ratios"]
    pairs = [f"{ratios[f'autoregressive over {peer}'][0]:.2f} times {peer}" for peer in ("hf", "llama.cpp")]
    words = " and ".join(pairs).replace("hf", "transformers")
    return "plain decoding of SmolLM2-135M in 4 bits, one thread", words


def shared_host(figures: Any) -> Headline:
    itself = ratio_over(figures["itself"]["seconds"].values(), "autoregressive", "auto")
    lookup = ratio_over(figures["ngram"]["seconds"].values(), "autoregressive", "auto")
    return (
        "`auto` over plain decoding, SmolLM2-135M in float32, two stages on two cores",
        f"{itself.mean:.2f}x with itself in 8 bits as draft model, {lookup.mean:.2f}x by prompt lookup",
    )


def families(figures: Any) -> Headline:
    counted = [one[kind] for one in figures.values() for kind in ("strategies", "chunks", "crowded", "gives_back")]
    requests, undecided = (sum(one[count] for one in counted) for count in ("requests", "undecided"))
    return (
        f"{len({one['family'] for one in figures.values()})} families of models beside transformers, every strategy",
        f"{requests:,} requests, no token differed{f' but in {undecided} undecided ones' if undecided else ''}",
    )


def recurrent(figures: Any) -> Headline:
    return (
        f"{figures['rows']} rows of a tree over a gated delta net as one batch, over one after another",
        times(figures["single_ms"] / figures["batch_ms"]),
    )


def auto_against(figures: Any) -> Headline:
    least = min(cluster["ratio"] for cluster in figures.values())
    most = max(cluster["over_papers"] for cluster in figures.values())
    return (
        f"`auto` beside the best of 24 settings of every other strategy, {len(figures)} clusters",
        f"{least:.3f} times at the least; up to {most:.2f} times the papers' strategies",
    )


def pipedec_demo_pair(figures: Any) -> Headline:
    def both(name: str) -> str:
        auto, best = (find(figures[name], "auto")["speedup"], max(find(figures[name], one)["speedup"] for one in WIDE))
        return f"{times(auto)} and {times(best)} at T = {name.removeprefix('T')}"

    return (
        "`auto` and PipeDec's best width over the plain pipeline, 70B on 14 GPUs",
        ", ".join(both(name) for name in ("T0", "T1")),
    )


def flowspec(figures: Any) -> Headline:
    def both(name: str) -> str:
        auto, own = (flowspec_paper.ratio(figures[name], one, "flowspec-7b") for one in ("auto", "flowspec"))
        return f"{auto} and {own} at T = {name.removeprefix('T')}"

    return "`auto` and FlowSpec over its naive pipeline, 7B on four boards", ", ".join(map(both, ("T0", "T1")))


def spd_share(figures: Any) -> Headline:
    shares = [f"{row['share']:.2f}" for row in figures.values() if row["lag"] == 0]
    theirs = [f"{1 - spd_overhead.LOST[row['cluster']]:.2f}" for row in figures.values() if row["lag"] == 0]
    return (
        "share of the theory that SPD's steps reach over 4, 8 and 16 stages",
        f"{', '.join(shares)}; its own code {', '.join(theirs)}",
    )


def demo(figures: Any) -> Headline:
    return "`penstock demo --embedded`, four edge boards, over the plain pipeline", times(figures["speedup"])


def serve_http(figures: Any) -> Headline:
    (boards, found), *_ = figures.items()
    some = [
        f"{times(row['over_plain'][0])} with {at}"
        for at in ("1", "4", "32")
        for row in found["concurrency"][at]
        if row["strategy"] == "auto"
    ]
    return f"throughput over HTTP on {boards} boards, over plain decoding, by requests at once", ", ".join(some)


def soak(figures: Any) -> Headline:
    return f"{figures['requests']:,} requests of good, slow and hostile clients", wrong(figures["problems"])


def chaos(portions: Any) -> Headline:
    figures = together(portions.values())
    return f"{figures['kills']} processes killed at random tokens", wrong(figures["problems"])


def attack(figures: Any) -> Headline:
    tried = sum(found["tried"] for found in figures.values())
    return f"{tried:,} attacks on server, sockets and checkpoints", wrong(
        [fault for found in figures.values() for fault in found["faults"]]
    )


def wrong(problems: list[str]) -> str:
    return f"{len(problems)} problems" if problems else "nothing went wrong, no token differed"


HEADLINES: Mapping[str, Callable[[Any], Headline]] = {
    "exactness": exactness,
    "overhead": overhead,
    "demo": demo,
    "beside_peers": beside_peers,
    "shared_host": shared_host,
    "families": families,
    "recurrent": recurrent,
    "auto_against": auto_against,
    "pipedec_demo_pair": pipedec_demo_pair,
    "flowspec": flowspec,
    "jupiter": jupiter.headline,
    "spd_overhead": spd_share,
    "serve_http": serve_http,
    "soak": soak,
    "chaos": chaos,
    "attack": attack,
}
"""Makes a section's headline of its figures, by section in the order of the first page."""
