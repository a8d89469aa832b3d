"""Tensor parallel groups of PipeDec's cards beside its groups in sequence, and the links with which groups pay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers import tensor_groups
from benchmarks.papers.tensor_groups import ALONE, APART, IN_SEQUENCE, TENSORS
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared.measured import Taken
from penstock.lab.common import markdown
from penstock.lab.grid import PLAIN

PROFILES = {"profile": "the synthetic profile", "weak": "a weak drafter, right in 40, 50, 55 and 58% of the steps"}


def take() -> Taken:
    return [f"python -m benchmarks.papers.{tensor_groups.NAME}"], tensor_groups.measured()


def render(figures: Any) -> str:
    return paragraphs(
        "PipeDec (section 3.1) groups neighbouring cards, which then work one after the other. Tensor parallel ranks "
        "share every layer instead and gather whole rows four times in each. Priced before an engine runs it: "
        "Llama-3.1-70B in fp32 over the paper's 14 RTX 3090, between which rows go through the host's memory at 96 "
        "Gbit/s with 0.03 ms of latency (assumed). Milliseconds per token:",
        decoding_table(figures["decoding"]),
        f"{gains(figures['decoding'])} A group whose two cards are in different servers holds all others up; "
        "the third and the fourth row differ in nothing else.",
        "**Link and rows.** A batch's trip through 14 cards over its trip through seven tensor parallel groups, by the "
        "link between the cards of a group; below 1 the groups are slower:",
        trips_table(figures["trips"]),
        "**Layers.** Two cards take half of what one takes for a layer. What they save grows with the layers as the "
        "exchange does, so that the number of layers decides nothing, but a layer's size does: the longest latency and "
        "the lowest rate of a link with which something of the saving is left, each as if the other cost nothing.",
        layers_table(figures["layers"]),
        "So tensor parallel groups pay for large layers on cards that read slowly, on one server's links, and for few "
        "rows: where a batch waits for weights. They do not pay over Ethernet with more than a few rows (a prompt, a "
        "wide tree, many requests), nor for models of a few billion parameters on fast cards, whose layers are read in "
        "less time than four messages take. Many plain requests at once fill a pipeline without any exchange; there "
        "groups only cost. `penstock plan` simulates both and takes the better one.",
    )


def decoding_table(rows: Any) -> str:
    names = list(rows[0]["ms"])
    table = [[one["cluster"], PROFILES[one["profile"]], *(f"{one['ms'][name]:.1f}" for name in names)] for one in rows]
    return markdown(["", "drafts", *(f"`{name}`" for name in names)], table)


def gains(rows: Any) -> str:
    """A sentence on tensor parallel groups beside single cards, by strategy."""
    by_case: Mapping[tuple[str, str], Mapping[str, float]] = {
        (one["cluster"], one["profile"]): one["ms"] for one in rows
    }

    def ratio(other: str, name: str, profile: str = "profile") -> str:
        return f"{by_case[other, profile][name] / by_case[TENSORS, profile][name]:.2f}"

    apart = by_case[APART, "profile"]["auto"] / by_case[TENSORS, "profile"]["auto"]
    return (
        f"Beside 14 single cards the groups are {ratio(ALONE, PLAIN)} times as fast plainly, "
        f"{ratio(ALONE, 'pipedec')} times with `pipedec`, {ratio(ALONE, 'auto')} with `auto`, and "
        f"{ratio(ALONE, 'auto', 'weak')} with `auto` and weak drafts: a shallower pipeline makes a miss cheaper. "
        f"Beside the paper's groups `auto` is {ratio(IN_SEQUENCE, 'auto')} times as fast. With one group in two "
        f"servers a token takes {apart:.2f} times as long as without."
    )


def trips_table(rows: Any) -> str:
    counts = list(rows[0]["ratios"])
    table = []
    for one in rows:
        gbit_s, latency_ms = tensor_groups.LINKS[one["link"]]
        link = f"{one['link']}: {gbit_s:g} Gbit/s, {latency_ms:g} ms"
        table.append([link, *(f"{one['ratios'][rows]:.2f}" for rows in counts)])
    return markdown(["link within a group", *(rows_of(count) for count in counts)], table)


def layers_table(rows: Any) -> str:
    counts = list(rows[0]["gbit_s"])
    table = [
        [
            one["model"],
            one["card"],
            f"{one['saved_us']:,.0f}",
            f"{one['latency_us'] / 1e3:.3f}",
            *(f"{one['gbit_s'][rows]:,.1f}" for rows in counts),
        ]
        for one in rows
    ]
    headings = ["", "two", "saved a layer, us", "latency, ms", *(f"Gbit/s, {rows_of(count)}" for count in counts)]
    return markdown(headings, table)


def rows_of(count: str) -> str:
    return "1 row" if str(count) == "1" else f"{count} rows"


SECTIONS = (
    Section(
        name=tensor_groups.NAME,
        title="Cards that share every layer, predicted",
        how=tensor_groups.HOW,
        take=take,
        render=render,
    ),
)
