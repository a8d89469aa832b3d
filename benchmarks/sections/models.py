"""Models of many kinds: families beside transformers, layers that carry a state, latents, MTP heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.costs import latent, mtp, out_of_reach, recurrent
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared.measured import Taken
from benchmarks.strategies import families
from penstock.lab.common import markdown

KIB, MIB = 1024, 1 << 20
COMPARED: Final = {
    "strategies": "every strategy, at T = 0 and 1",
    "chunks": "a long prompt in chunks",
    "crowded": "requests that give way",
    "gives_back": "the same, nothing kept out of reach",
}


def render_families(figures: Mapping[str, Any]) -> str:
    def total(kind: str, count: str) -> int:
        return sum(one[kind][count] for one in figures.values())

    counts = ("requests", "tokens", "misses", "dead", "given_way", "undecided")
    rows = [[what, *(f"{total(kind, count):,}" for count in counts)] for kind, what in COMPARED.items()]
    headings = ["", "requests", "tokens", "misses", "rows wrong in flight", "gave way", "undecided"]
    names = ", ".join(f"`{name}`" for name in figures)
    return paragraphs(
        f"{len(figures)} small random checkpoints of {len({one['family'] for one in figures.values()})} families, each "
        "with every strategy over 1, 3 and 5 stages and with one layer to a stage; with a prompt of 100 tokens that "
        f"enters in chunks of {', '.join(map(str, families.CHUNKS))}; and with four requests over slots for little "
        "more than two, which share prefixes or give back what no later row reaches. The drafter is wrong in 40% "
        "of its first choices.",
        markdown(headings, rows),
        "Greedy tokens are those of transformers' `generate`, sampled ones those that transformers' logits give with "
        "the same noise. Requests are undecided whose tokens differ where transformers' own two best logits are closer "
        "than 1e-4: there sums in another order may choose the other.",
        f"The checkpoints: {names}.",
    )


def take_recurrent() -> Taken:
    return ["python -m benchmarks.costs.recurrent"], recurrent.measured()


def render_recurrent(figures: Any) -> str:
    together, apart = figures["batch_ms"], figures["single_ms"]
    return paragraphs(
        "One gated delta net with the widths of Qwen3.5-4B's, in float32, behind "
        f"{recurrent.CONTEXT} certain tokens. {figures['rows']} rows of a tree take {together:.0f} ms as one batch and "
        f"{apart:.0f} ms one after another: **{apart / together:.1f}x**. A row takes "
        f"{figures['row_bytes'] / KIB:.0f} KiB, keys and values of one of the model's layers with attention "
        f"{figures['kv_bytes'] / KIB:.0f}."
    )


def take_latent() -> Taken:
    return ["python -m benchmarks.costs.latent"], latent.measured()


def render_latent(figures: Any) -> str:
    rows = [
        [str(one["rows"]), f"{one['slots']:,}", f"{one['expanded_ms']:.1f}", f"{one['latent_ms']:.1f}"]
        for one in figures["cases"]
    ]
    return paragraphs(
        "One attention layer with DeepSeek-V2-Lite's widths, 16 heads, in float32. A row takes "
        f"{figures['expanded_bytes'] / KIB:.2f} KiB as keys and values and {figures['latent_bytes'] / KIB:.2f} as the "
        "latent that they are made of. Milliseconds of so many rows:",
        markdown(["rows", "behind", "keys and values", "latents"], rows),
    )


def take_out_of_reach() -> Taken:
    return ["python -m benchmarks.costs.out_of_reach"], out_of_reach.measured()


def render_out_of_reach(figures: Any) -> str:
    rows = [
        [
            one["model"],
            " and ".join(near_layers(one["layers"], *kind) for kind in one["near"]),
            f"{one['tokens']:,}",
            f"{one['all_bytes'] / MIB:,.0f}",
            f"{one['reach_bytes'] / MIB:,.0f}",
        ]
        for one in figures
    ]
    return paragraphs(
        "Memory of one request in bfloat16, MiB, room for drafts left out: with prefix caching every layer keeps every "
        "token; without it, layers with a window or a state keep what later rows reach.",
        markdown(["", "layers with a window or a state", "context", "with prefix caching", "without"], rows),
    )


def near_layers(layers: int, near: int, reach: int, state: bool) -> str:
    count = f"all {layers}" if near == layers else f"{near} of {layers}"
    return f"{count}, states" if state else f"{count}, {reach:,} tokens"


def render_mtp(figures: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{row['entry']}`",
            temperature,
            mtp.shares(one),
            f"{one['mean_acceptance_length']:.2f}",
            f"{one['speedup']:.2f}x ({one['bounds'][0]:.2f}-{one['bounds'][1]:.2f})",
        ]
        for row in figures.values()
        for temperature, one in row["temperatures"].items()
    ]
    cells = [one for row in figures.values() for one in row["temperatures"].values()]
    same = "All tokens are" if all(one["identical"] for one in cells) else "NOT all tokens are"
    return paragraphs(
        f"The demo target over the preset `{mtp.CLUSTER}`, on held-out code, with one head that `penstock train mtp` "
        "made. By depth, how often, in percent, the target's token was among the nodes there, the path before it "
        "right; tokens per tree; and speed over the plain pipeline, with modelled times.",
        markdown(["", "T", "right at depth 1 to 4", "tokens per tree", "over plain"], rows),
        f"{same} those of plain decoding. In-flight correction changes nothing here: the head reads states that leave "
        "the last stage, and with them the token's successor is decided.",
    )


SECTIONS = (
    Section(name=families.NAME, title="Families of models", how=families.HOW, take=None, render=render_families),
    Section(
        name=recurrent.NAME,
        title="A tree over gated delta nets",
        how=recurrent.HOW,
        take=take_recurrent,
        render=render_recurrent,
    ),
    Section(name=latent.NAME, title="Latent attention", how=latent.HOW, take=take_latent, render=render_latent),
    Section(
        name=out_of_reach.NAME,
        title="What no row reaches any more",
        how=out_of_reach.HOW,
        take=take_out_of_reach,
        render=render_out_of_reach,
    ),
    Section(name=mtp.NAME, title="An MTP head", how=mtp.HOW, take=None, render=render_mtp),
)
