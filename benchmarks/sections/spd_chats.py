"""SPD (Wang et al., 2026): Tables 3 and 4, chats of a real instruct model, beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.drafters import spd_chats
from benchmarks.sections.base import Section, paragraphs
from benchmarks.sections.spd import CELLS, Row, cells_of, identical, label, sizes, slashed
from penstock.lab.common import markdown

PAPER: dict[str, dict[str, Row]] = {
    "mt_bench": {
        "eagle3 n=4 Ls=1": ((2.31, 2.11), (1.97, 1.80), (2.35, 2.15), (2.61, 2.38)),
        "eagle3 n=8 Ls=1": ((2.61, 2.14), (2.11, 1.73), (3.48, 2.86), (2.83, 2.32)),
        "early_exit n=4 Ls=1": ((1.54, 1.37), (1.38, 1.22), (1.59, 1.41), (1.69, 1.50)),
        "early_exit n=8 Ls=1": ((1.66, 1.33), (1.44, 1.15), (1.60, 1.28), (1.80, 1.44)),
        "spd n=4 Ls=1": ((1.82,), (1.69,), (1.92,), (2.18,)),
        "spd n=4 Ls=2": ((1.86,), (1.74,), (1.96,), (2.23,)),
        "spd n=4 Ls=4": ((1.93,), (1.79,), (2.04,), (2.38,)),
        "spd n=8 Ls=1": ((2.07,), (1.92,), (2.12,), (2.59,)),
        "spd n=8 Ls=2": ((2.20,), (2.03,), (2.27,), (2.85,)),
        "spd n=8 Ls=4": ((2.23,), (2.09,), (2.29,), (2.86,)),
    },
    "gsm8k": {
        "eagle3 n=4 Ls=1": ((2.97, 2.71), (2.30, 2.10), (3.43, 3.14), (3.02, 2.76)),
        "eagle3 n=8 Ls=1": ((3.78, 3.10), (2.62, 2.15), (5.06, 4.15), (3.46, 2.84)),
        "early_exit n=4 Ls=1": ((1.70, 1.51), (1.54, 1.37), (1.75, 1.56), (1.86, 1.65)),
        "early_exit n=8 Ls=1": ((1.97, 1.58), (1.69, 1.35), (1.91, 1.53), (2.17, 1.74)),
        "spd n=4 Ls=1": ((2.19,), (2.01,), (2.29,), (2.37,)),
        "spd n=4 Ls=2": ((2.25,), (2.06,), (2.35,), (2.45,)),
        "spd n=4 Ls=4": ((2.39,), (2.17,), (2.49,), (2.64,)),
        "spd n=8 Ls=1": ((2.63,), (2.37,), (2.73,), (2.95,)),
        "spd n=8 Ls=2": ((2.79,), (2.52,), (2.92,), (3.16,)),
        "spd n=8 Ls=4": ((2.99,), (2.67,), (3.11,), (3.43,)),
    },
}
"""Qwen3.5-4B, Tables 3 and 4, over 4 and 8 stages; in the order of CELLS: acceptance length and, where drafting takes
time, theoretical speed-up."""
METHODS = ("eagle3", "early_exit", "spd")


def table(name: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    """The rows of one set, the paper's and ours, by method, over the numbers of stages that we have."""
    ours = {key.removeprefix(f"{name} "): row for key, row in figures.items() if key.startswith(f"{name} ")}
    stages = {row["stages"] for row in ours.values()}
    published = [key for key in PAPER[name] if sizes(key)[0] in stages]
    keys = dict.fromkeys([*published, *ours])
    for key in sorted(keys, key=lambda key: (METHODS.index(key.split()[0]), sizes(key))):
        if key in published:
            yield [f"paper: {label(key)}", *map(slashed, PAPER[name][key])]
        if key in ours:
            values = [tuple(dict.fromkeys((one["length"], one["theoretical"]))) for one in cells_of(ours[key])]
            yield [f"ours: {label(key)}", *(f"**{slashed(one)}**" for one in values)]


def render_chats(figures: Mapping[str, Any]) -> str:
    one = next(iter(figures.values()))
    tables = [
        part
        for name, title in spd_chats.SETS.items()
        for part in (f"{title}:", markdown(["", *CELLS], list(table(name, figures))))
    ]
    tokens = [cell["tokens"] for row in figures.values() for cell in cells_of(row)]
    return paragraphs(
        "Acceptance length / theoretical speed-up, as in [Tables 1, 2 and 5](#spd-tables-1-2-and-5), of a model that "
        "knows what is asked: SmolLM2-135M-Instruct in float32, whose 30 layers and head are over the stages as the "
        "engine places them, alike in parameters (over four stages 10, 9, 9 and 2 layers, and the head). It answers "
        f"the first turns ({one['prompts']} of each set) behind its chat template, at most {one['tokens']} tokens of "
        f"each ({min(tokens)} to {max(tokens)} tokens a cell). Its drafters are those of [how drafters "
        "learn](real-models.md#how-drafters-learn), EAGLE-3 with one layer, SPD's module of the variant `paper`, "
        "trained for its n; the early exit reads the state behind the first stage. The paper's rows: Qwen3.5-4B, whose "
        "drafters learned from a million samples; ours from 812 conversations, each read once at most, in two to eight "
        "minutes of one core.",
        *tables,
        f"{identical(figures)}",
    )


SECTIONS = (
    Section(
        name=spd_chats.NAME,
        title="SPD, Tables 3 and 4",
        how=spd_chats.HOW,
        take=None,
        render=render_chats,
    ),
)
