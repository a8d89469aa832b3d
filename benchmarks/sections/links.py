"""The time of a message from process to process, by kind of link."""

from __future__ import annotations

from typing import Any

from benchmarks.costs import links
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared.measured import Taken
from penstock.lab.common import markdown

NAMES = {
    "ipc": "ours, Unix-domain socket",
    "tcp": "ours, tcp",
    "tls": "ours, TLS 1.3",
    "zeromq": "ZeroMQ",
    "curve": "ZeroMQ, CURVE",
}
PLACES = {"loopback": "on loopback", "namespaces": "between two network namespaces, joined by a virtual Ethernet"}


def take() -> Taken:
    return ["pip install pyzmq", "python -m benchmarks.costs.links"], links.measured()


def render(figures: Any) -> str:
    parts = [
        "Milliseconds from one process to another, the median, of a message that leaves alone; in brackets MB/s with "
        "eight on their way. A message is a header of 200 bytes and hidden states of the size above.",
    ]
    for place, where in PLACES.items():
        sizes = sorted({row["size"] for row in figures})
        rows = [
            [NAMES[kind], *(cell(figures, place, kind, size) for size in sizes)]
            for kind in NAMES
            if any((row["place"], row["kind"]) == (place, kind) for row in figures)
        ]
        parts.append(markdown([where, *map(size_words, sizes)], rows))
    parts.append(
        "On two cores of a shared host, without a network: what a link costs beside it. ZeroMQ is measured with its "
        "own blocking receive, which an inbox that also waits for other things cannot use."
    )
    return paragraphs(*parts)


def cell(figures: Any, place: str, kind: str, size: int) -> str:
    (row,) = [one for one in figures if (one["place"], one["kind"], one["size"]) == (place, kind, size)]
    alone = f"{row['ms']:.3f}"
    return alone if size == 0 else f"{alone} ({row['mb_s']:.0f})"


def size_words(size: int) -> str:
    if size == 0:
        return "header alone"
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


SECTIONS = (Section(name="links", title="Links", how="Measured, without a model", take=take, render=render),)
