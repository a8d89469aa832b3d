"""PipeDec's fourteen cards as seven tensor parallel groups of two, predicted, and where such groups pay.

    python -m benchmarks.papers.tensor_groups

PipeDec (section 3.1) lets the two cards of a group work one after the other. Here they share every layer, by the prices
of ``penstock/cluster/timing.py``, before an engine runs them. A group whose cards are in two servers would
exchange rows over Ethernet in every layer, so that there are eight cards in one server and six in the other, instead of
the seven and seven of the preset; that placement is here, too.

First each pipeline as it decodes, plainly and with drafts, then the trip of a batch by its rows and the link between
the two cards of a group, then what the link has to do for models whose layers are larger and smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from benchmarks.papers.pp_eagle_table import LLAMA_8B
from benchmarks.shared.benchmark import show
from benchmarks.shared.profile import ACCURACY
from penstock.cluster import PRICES, Cluster, load_cluster
from penstock.cluster.spec import ModelPrice
from penstock.cluster.timing import (
    GATHERS,
    LinkTiming,
    StageTiming,
    device_timing,
    exchange_of,
    link_timings,
    rank_prices,
    stage_timings,
)
from penstock.lab.grid import PLAIN, WARM_UP, is_plain, parse_entries
from penstock.lab.script import profile_script
from penstock.lab.simulator import simulate

NAME, HOW = "tensor_groups", "Simulated, with synthetic drafters"
REQUESTS, TOKENS = 3, 60
ENTRIES = (PLAIN, "pipedec", "auto")
PROFILES: Final[Mapping[str, list[float]]] = {"profile": list(ACCURACY), "weak": [0.4, 0.5, 0.55, 0.58]}
"""Chance that the target's token is among the first 1, 2, ... candidates."""
ALONE, IN_SEQUENCE, TENSORS, APART = (
    "14 cards",
    "7 x 2 in sequence",
    "7 x 2, tensors",
    "7 x 2, tensors, a group in two servers",
)
CLUSTERS = (ALONE, IN_SEQUENCE, TENSORS, APART)
LINKS: Final[Mapping[str, tuple[float, float]]] = {
    "NVLink": (2880, 0.02),
    "PCIe through the host": (96, 0.03),
    "25 Gbit Ethernet": (23.5, 0.1),
    "10 Gbit Ethernet": (9.4, 0.1),
    "1 Gbit Ethernet": (0.94, 0.2),
}
"""Rate in Gbit/s and latency in milliseconds within a group, as in the presets."""
ROWS = (1, 8, 32, 128)
MODELS: Final[Mapping[str, ModelPrice]] = {
    "Llama-3.1-70B, fp32": PRICES["llama-3.1-70b-fp32"],
    "Llama-3.1-70B, bf16": PRICES["llama-3.1-70b-bf16"],
    "Llama-3.1-8B, bf16": LLAMA_8B,
    "Llama-2-7B, 4 bits": PRICES["llama-2-7b-4bit"],
    "TinyLlama-1.1B, fp16": PRICES["tinyllama-1.1b-fp16"],
}
CARDS: Final[Mapping[str, str]] = {"RTX 3090": "pipedec-7", "H100": "two-servers"}
"""A preset with cards of each kind."""


def measured() -> dict[str, Any]:
    return {
        "decoding": [decoding(name, profile) for profile in PROFILES for name in CLUSTERS],
        "trips": [trips(link) for link in LINKS],
        "layers": [layer(card, model) for card in CARDS for model in MODELS],
    }


def cards(name: str, link: tuple[float, float] | None = None) -> Cluster:
    """The paper's cards in stages as named; ``link``: another one within every group, and within the servers."""
    if name in (ALONE, IN_SEQUENCE):
        return load_cluster("pipedec-14x3090" if name == ALONE else "pipedec-7")
    paper = load_cluster("pipedec-7")
    groups = [{"devices": list(one.devices), "split": "tensors", "layers": sum(one.layers)} for one in paper.stages]
    hosts = {one.name: one.host for one in paper.devices}
    if name == TENSORS:
        hosts["b1"] = hosts["a7"]
    devices = [{"name": one.name, "host": hosts[one.name], "kind": one.kind} for one in paper.devices]
    links = {} if link is None else {"local": {"bandwidth_gbit_s": link[0], "latency_ms": link[1]}}
    return load_cluster("pipedec-7", stages=groups, devices=devices, links=links)


def decoding(name: str, profile: str) -> dict[str, Any]:
    """Milliseconds per token of each strategy."""
    accuracy, cluster = PROFILES[profile], cards(name)
    script = profile_script(accuracy, REQUESTS, TOKENS, seed=1)
    found = {}
    for entry, config in parse_entries(ENTRIES, {"method": "synthetic", "accuracy": accuracy}):
        runs = simulate(cluster, script, None if is_plain(config) else config, WARM_UP)
        found[entry] = 1e3 * sum(run.seconds for run in runs) / sum(run.tokens - 1 for run in runs)
    return {"cluster": name, "profile": profile, "ms": found}


def trips(link: str) -> dict[str, Any]:
    """A batch's trip through fourteen cards over its trip through seven groups, by rows."""
    alone, joined = cards(ALONE), cards(TENSORS, LINKS[link])
    return {"link": link, "ratios": {rows: trip_s(alone, rows) / trip_s(joined, rows) for rows in ROWS}}


def trip_s(cluster: Cluster, rows: int) -> float:
    parts: list[StageTiming | LinkTiming] = [*stage_timings(cluster), *link_timings(cluster)]
    return sum(part.seconds(rows) for part in parts)


def layer(card: str, name: str) -> dict[str, Any]:
    """Microseconds that two cards save by sharing a layer, and the link with which nothing of them is left.

    ``latency_us``: with a rate without end, and one row. ``gbit_s``: without latency, by rows.
    """
    model, device = MODELS[name], next(one for one in load_cluster(CARDS[card]).devices if one.name == "a1")
    speeds = (1.0, 1.0)
    # Neither head nor overhead counts, so that one layer stands for all.
    device, one = replace(device, overhead_ms=0.0), replace(model, layers=1)
    whole, shared = (
        device_timing(device, part, range(1), 1.0, head=False) for part in (one, rank_prices(one, speeds)[0])
    )
    bytes_per_row = exchange_of(one, speeds, 1, head=False).row_bytes - model.row_bytes  # without the way in
    saved = {rows: whole.seconds(rows) - shared.seconds(rows) for rows in ROWS}
    return {
        "card": card,
        "model": name,
        "saved_us": 1e6 * saved[1],
        "latency_us": 1e6 * saved[1] / GATHERS,
        "gbit_s": {rows: rows * bytes_per_row * 8 / saved[rows] / 1e9 for rows in ROWS},
    }


if __name__ == "__main__":
    show(measured())
