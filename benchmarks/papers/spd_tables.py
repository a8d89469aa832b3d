"""The shape of SPD's Tables 1 to 5 with the demo target, on held-out code.

    python -m benchmarks.papers.spd_tables --eagle3 DIR --early-exit DIR ... --spd DIR ... [--prompts 10] [--tokens 64]

Methods: EAGLE-3 drafting m = n - 1 levels before each trip, early exit (PPSD) from the end of the first stage, and SPD
with as many layers as each folder's module has, from its input states and, where the module can, its output states
(Table 2). Trees: a chain (W = 1), and four branches of four children each (W = 4); T = 0, and T = 1 with top-k 50.

L' and the theoretical speed-up are taken in ideal lockstep, as the paper's are (``virtual.in_lockstep``); beside them
the speed-up on the presets spd-4, spd-8 and spd-16 with their modelled times. All in virtual time.

Each row is written to benchmarks/measured/papers/spd_tables.json as it finishes. What is there with as many prompts and
tokens is not run again; remove the file after a change of the engine or of a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.shared import virtual
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.cluster import load_cluster
from penstock.core import ConfigError
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import Question
from penstock.models.speculators.base import SpeculatorCheckpoint
from penstock.models.speculators.open import open_speculator

NAME = "spd_tables"
STAGES = (4, 8, 16)
TEMPERATURES = (0.0, 1.0)
TOP_K = 50
WIDTHS = (1, 4)
METHODS = ("eagle3", "early_exit", "spd")


@dataclass(frozen=True)
class Method:
    """One row of the tables: a drafter over a number of stages. ``layers`` is its own number of layers, the paper's
    L_s."""

    name: str
    stages: int
    layers: int
    drafter: Mapping[str, Any]

    @property
    def output_states(self) -> bool:
        return bool(self.drafter.get("post_state"))

    @property
    def key(self) -> str:
        return key_of(self.name, self.stages, self.layers, self.output_states)

    @property
    def entries(self) -> dict[int, str]:
        """The entry for ``penstock bench`` by width W."""
        depth = self.stages - 1
        if self.name == "eagle3":
            tree = "static_tree[tree_size={},tree_depth={},children={}]"
            return {width: tree.format(width * depth, depth, width) for width in WIDTHS}
        return {width: f"pipedec[width={width},children={width}]" for width in WIDTHS}


def key_of(name: str, stages: int, layers: int, output_states: bool = False) -> str:
    return f"{name} n={stages} Ls={layers}{' output states' if output_states else ''}"


def cell_key(temperature: float, width: int) -> str:
    return f"T={temperature:g} W={width}"


def methods(name: str, folder: str, stages: int, target: Checkpoint, first: int | None = None) -> Iterator[Method]:
    """The rows that a folder's drafter gives over ``stages`` stages; prints the reason where it gives none.

    ``first`` is the first stage's number of layers, by default that of the others.
    """
    speculator = open_speculator(folder, target)
    if speculator.kind != name:
        raise ConfigError(f"{virtual.flag(name)}: {folder} holds a drafter of kind {speculator.kind!r}")
    if (why := unfit(speculator, stages, first or target.num_layers // stages)) is not None:
        print(f"left out: {folder} at {stages} stages: {why}", flush=True)
        return
    drafter = {"method": name, "model": folder}
    yield Method(name, stages, speculator.depth, drafter)
    if name == "spd" and speculator.stages is None:
        yield Method(name, stages, speculator.depth, {**drafter, "post_state": True})


def unfit(speculator: SpeculatorCheckpoint, stages: int, first: int) -> str | None:
    """The reason why a drafter does not match the paper's for these stages and first layers; None where it does."""
    if speculator.stages not in (None, stages):
        return f"it was trained for {speculator.stages}"
    deepest = max(speculator.reads)
    if speculator.kind == "early_exit" and deepest != first:
        return f"it reads layer {deepest}, the first stage ends with layer {first}"
    return None


def measured(method: Method, sizes: virtual.Sizes, model: str = "demo") -> dict[str, Any]:
    """One row: all cells, in lockstep and on the preset."""
    preset, entries = f"spd-{method.stages}", list(method.entries.values())
    questions = virtual.asked(sizes, TEMPERATURES, TOP_K)
    ideal = virtual.compared(virtual.in_lockstep(preset), method.drafter, entries, questions, model=model)
    modelled = virtual.compared(load_cluster(preset), method.drafter, entries, questions, model=model)
    cells = {
        cell_key(temperature, width): cell(*(virtual.find(runs, entry, temperature) for runs in (ideal, modelled)))
        for temperature in TEMPERATURES
        for width, entry in method.entries.items()
    }
    return {
        "method": method.name,
        "stages": method.stages,
        "layers": method.layers,
        "output_states": method.output_states,
        "cells": cells,
    }


def in_lockstep(method: Method, questions: Sequence[Question], **options: Any) -> dict[str, list[StrategyRun]]:
    """One run for each prompt set by cell; ``options`` are the engine's."""
    cluster, entries = virtual.in_lockstep(f"spd-{method.stages}"), list(method.entries.values())
    runs = virtual.compared(cluster, method.drafter, entries, questions, **options)
    return {
        cell_key(temperature, width): [run for run in runs if (run.strategy, run.temperature) == (entry, temperature)]
        for temperature in TEMPERATURES
        for width, entry in method.entries.items()
    }


def cell(in_theory: StrategyRun, on_preset: StrategyRun) -> dict[str, Any]:
    return {
        "length": in_theory.equivalent_acceptance_length,
        "theoretical": in_theory.theoretical_speedup,
        "preset": on_preset.wall_clock_speedup,
        "bounds": on_preset.wall_clock_speedup_interval,
        "identical": in_theory.identical_to_autoregressive and on_preset.identical_to_autoregressive,
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    target = open_checkpoint(virtual.TARGET)
    named = [(name, folder) for name, folders in wanted.drafters.items() for folder in folders]
    rows = [method for stages in wanted.options.stages for one in named for method in methods(*one, stages, target)]
    for method in rows:
        yield method.key, partial(measured, method, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, METHODS, stages=STAGES)
