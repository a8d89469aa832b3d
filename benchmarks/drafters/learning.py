"""Learning curves of a real model's drafters, from what ``penstock train`` keeps of its runs.

    python -m benchmarks.drafters.learning [NAME=FOLDER=HOURS ...]

FOLDER is the output of a run, HOURS the processor time of the run, with the states that the target computed for it.
``data`` in its settings is a hash of the text that it learned from. A run's curve is written to
benchmarks/measured/drafters/learning.json, in place of what NAME has there. Then docs/images/learning.png is drawn of
the runs of about as many steps as the longest: shares of held-out tokens at T = 0 over the tokens that were read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.measured import kept_figures, store
from benchmarks.shared.root import ROOT
from penstock.lab.plots import HUES, SMALL, Labels, one_panel, save
from penstock.lab.trainer.loop import CANDIDATES

NAME, HOW = "learning", "Measured on one core, with SmolLM2-135M-Instruct"
IMAGE = ROOT / "docs" / "images" / "learning.png"
SETTINGS = (
    *("kind", "dtype", "learning_rate", "batch_tokens", "draft_vocab_size", "ttt_steps", "heads"),
    *("spec_layers", "variant", "stages", "exit_layer", "block_size", "in_flight", "markov_rank", "data"),
)
ALIKE = 0.9
"""Least steps of a run in the plot, as a fraction of the longest run's."""
STYLES = {1: "-", 4: "--"}
"""Line styles by the number of candidates."""


def curve(folder: Path, hours: float) -> dict[str, Any]:
    """A run's settings, and at each saved step its loss and the fractions among the best of ``CANDIDATES``.

    ``last`` are the fractions that are the best candidate at the end, by the trainee's step: how far ahead of the last
    token with known states it drafts, for EAGLE-3 and the blocks.
    """
    state = torch.load(folder / "training" / "state.pt", map_location="cpu", weights_only=True)
    settings = json.loads(state["settings"])
    entries = json.loads(state["history"])
    return {
        "settings": {name: settings[name] for name in SETTINGS if settings.get(name) is not None},
        "hours": hours,
        "entries": [
            [step, round(loss, 3), *(round(by_step[0][count - 1], 4) for count in CANDIDATES)]
            for step, loss, by_step, _ in entries
        ],
        "last": [round(shares[0], 4) for shares in entries[-1][2]],
    }


def draw(figures: Mapping[str, Any], image: Path) -> None:
    """Shares over thousands of tokens read, a colour for each run and a style for each number of candidates.

    Shorter runs, whose learning rate fell sooner, are left out. Raises ValueError where the colours do not suffice.
    """
    title = "Held-out tokens: the best candidate (solid) and among the best 4 (dashed), T = 0"
    labels = Labels(title, "tokens read, thousands", "share")
    figure, axes = one_panel(6.4, 4.0, labels)
    longest = max(one["entries"][-1][0] for one in figures.values())
    drawn = {name: one for name, one in figures.items() if one["entries"][-1][0] >= ALIKE * longest}
    for (name, one), colour in zip(drawn.items(), HUES[: len(drawn)], strict=True):
        read = [step * one["settings"]["batch_tokens"] / 1000 for step, *_ in one["entries"]]
        for count, style in STYLES.items():
            shares = [entry[2 + CANDIDATES.index(count)] for entry in one["entries"]]
            axes.plot(read, shares, style, color=colour, label=name if count == 1 else None, linewidth=1.5)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=SMALL, frameon=False, ncols=2, loc="upper right")
    save(figure, image)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="learning curves of drafters")
    parser.add_argument("runs", nargs="*", metavar="NAME=FOLDER=HOURS")
    figures = kept_figures(NAME)
    for run in parser.parse_args(arguments).runs:
        name, folder, hours = run.split("=")
        figures[name] = curve(Path(folder), float(hours))
        named = " ".join(f"{one}=FOLDER={figure['hours']}" for one, figure in figures.items())
        store(NAME, HOW, ([f"python -m benchmarks.drafters.learning {named}"], figures))
    draw(figures, IMAGE)


if __name__ == "__main__":
    main()
