"""Many requests at once: throughput and latency by concurrency, and a long prompt amid requests that decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.sections.base import Section
from penstock.lab.grid import PLAIN
from penstock.requests.slots import BLOCK


def serving_values(figures: Any) -> Mapping[str, Any]:
    """The least lower bound of `auto`, and its speed for a single request."""
    bounds = [
        (row["over_plain"][1], cluster, concurrency)
        for cluster, found in figures.items()
        for concurrency, entries in found["concurrency"].items()
        for row in entries
        if row["strategy"] == "auto"
    ]
    alone = (f"`{name}` {per_token(found):.2f}x and {found['alone']:.2f}x" for name, found in figures.items())
    return {"worst": min(bounds), "alone": "; ".join(alone)}


def per_token(found: Mapping[str, Any]) -> float:
    """Speed of a token with `auto` relative to plain decoding, for a single request."""
    plain, auto = ({row["strategy"]: row for row in found["concurrency"]["1"]}[name] for name in (PLAIN, "auto"))
    return float(plain["tpot_p50"] / auto["tpot_p50"])


SECTIONS = {
    "serving": Section(values=serving_values),
    "serve_http": Section(values=lambda figures: {"same": all(one["identical"] for one in figures.values())}),
    "interference": Section(values=lambda figures: {"prompt_rows": BLOCK}),
}
