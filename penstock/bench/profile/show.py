"""A profile as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster.measured import LayerTimes, interpolated
from penstock.cluster.memory import held_by
from penstock.cluster.prices import ModelPrice
from penstock.cluster.spec import LinkBetween
from penstock.planner.jupiter import least_piece
from penstock.tables import FiguresTable


@dataclass(frozen=True)
class Profile:
    """A model's sizes, its layers' times by device, the links between hosts, and the slots of stages."""

    model: ModelPrice
    times: dict[str, LayerTimes]
    links: list[LinkBetween]
    kv_slots: int


def device_table(profile: Profile, name: str) -> FiguresTable:
    """Milliseconds by rows of a batch: of a layer after several contexts, of a stage beside its layers, of the head."""
    times = profile.times[name]
    table = FiguresTable(
        "rows",
        *(f"layer behind\n{context}, ms" for context in times.contexts),
        "stage beside,\nms",
        "head, ms",
        title=f"{name}: from {least_rows(times, profile.model.layers)} rows on 90% of the best rows per second",
    )
    for rows, layer, stage, head in zip(times.rows, times.layer_ms, times.stage_ms, times.head_ms, strict=True):
        table.add_row(str(rows), *(f"{ms:.3f}" for ms in layer), f"{stage:.3f}", f"{head:.3f}")
    return table


def least_rows(times: LayerTimes, layers: int) -> int:
    """The paper's b: the smallest number of rows that still uses the device well."""
    grid = times.of_stage(layers, head=False)
    return least_piece(lambda rows: rows / interpolated(times.rows, times.contexts, grid, rows, 0), times.rows[-1])


def held_table(profile: Profile) -> FiguresTable:
    """Megabytes that a device holds for one layer and for the whole model."""
    model, slots = profile.model, profile.kv_slots
    table = FiguresTable("held, MB", "weights", f"KV of {slots} tokens")
    parts = {"a layer": (1, False, False), "the whole model": (model.layers, True, True)}
    for what, (layers, embedding, head) in parts.items():
        held = held_by(model, layers, slots, embedding=embedding, head=head)
        table.add_row(what, f"{held.weights / 1e6:.1f}", f"{held.cache / 1e6:.1f}")
    return table


def link_table(links: Sequence[LinkBetween]) -> FiguresTable:
    table = FiguresTable("link", "latency, ms", "Mbit/s")
    for link in links:
        table.add_row(" - ".join(link.ends), f"{link.latency_ms:.2f}", f"{1e3 * link.bandwidth_gbit_s:.0f}")
    return table
