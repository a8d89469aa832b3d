"""Drafters trained for a real model: how they learn, and how often they are right on six prompt sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.sections.base import Section, paragraphs
from benchmarks.sections.real_model import SETS
from benchmarks.strategies import drafter_acceptance, learning
from benchmarks.strategies.drafter_acceptance import shares, together
from penstock.bench.formats import markdown

RECIPE = (
    "penstock train KIND --model SmolLM2 --self-generate 512 --temperatures 0,0.7,1 --max-length 512 "
    "--draft-vocab-size 8192"
)


def render_learning(figures: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{one['settings']['kind']}`",
            str(one["settings"]["batch_tokens"]),
            f"{one['settings']['learning_rate']:g}",
            f"{one['entries'][-1][0]}",
            f"{one['hours']:.1f}",
            " / ".join(f"{100 * share:.0f}" for share in one["entries"][-1][2:]),
        ]
        for one in figures.values()
    ]
    return paragraphs(
        "SmolLM2-135M-Instruct wrote 512 conversations with itself, 150,518 tokens of them answers, and each drafter "
        f"learned from them: `{RECIPE}`, with `--batch-tokens` and `--learning-rate` as below; EAGLE-3 of four "
        "`--ttt-steps`, SPD's module of two `--spec-layers` for two `--stages`. Writing the text took 0.4 hours of "
        "processor time, the target's hidden states another 0.1. Percent of held-out tokens, at T = 0, among the best "
        "1, 4 and 16 candidates:",
        markdown(
            ["drafter", "tokens a step", "learning rate", "steps", "hours of one core", "best 1 / 4 / 16"],
            rows,
        ),
        "![Shares of held-out tokens over the tokens read](../../images/learning.png)",
        "11% of the held-out tokens cannot be drafted at all, since they are not among the 8,192 of the draft "
        "vocabulary.",
    )


def render_acceptance(figures: Mapping[str, Any]) -> str:
    one = next(iter(figures.values()))
    rows = [
        [
            f"`{name}`",
            temperature,
            *(shares(sets[of][0]) for of in SETS),
            f"**{shares(together(sets))}**",
        ]
        for name, figure in figures.items()
        for temperature, sets in figure["temperatures"].items()
    ]
    later = [
        [f"`{name}`", temperature, *(shares(together(sets, step)) for step in (1, 2) if step < steps_of(sets))]
        for name, figure in figures.items()
        for temperature, sets in figure["temperatures"].items()
        if steps_of(sets) > 1
    ]
    width = max((len(row) for row in later), default=0)
    return paragraphs(
        f"SmolLM2-135M-Instruct in float32 answered the first chats ({one['per_set']}) of each of six prompt "
        f"sets, at most {one['tokens']} tokens each. How often, in percent, its next token is among the "
        "best 1, 4 and 16 candidates of a drafter that knows the text before it. At T = 1 the candidates are "
        "ranked with the target's own noise. `ngram` is prompt lookup; `eagle3` and `spd` are those of "
        "[how drafters learn](#how-drafters-learn), `spd` after 1,000 of its steps. `all` is of "
        f"{one_row(one)} tokens: it may be 6 points off by chance, a set's more than twice that.",
        markdown(["drafter", "T", *SETS.values(), "all"], rows),
        "The same, of all sets, where no state of the target's is known of the last one or two tokens but what the "
        "drafter has made of them (EAGLE-3), or where the last token has passed a stage (SPD's module):",
        markdown(
            ["drafter", "T", "one further", "two further"][:width],
            [row + ["-"] * (width - len(row)) for row in later],
        ),
    )


def one_row(figure: Mapping[str, Any]) -> int:
    """How many tokens a row of the table is of."""
    return max(together(sets)[0] for sets in figure["temperatures"].values())


def steps_of(sets: Mapping[str, Any]) -> int:
    return min(len(steps) for steps in sets.values())


SECTIONS = (
    Section(
        name=learning.NAME,
        title="How drafters learn",
        how=learning.HOW,
        take=None,
        render=render_learning,
    ),
    Section(
        name=drafter_acceptance.NAME,
        title="How often trained drafters are right",
        how=drafter_acceptance.HOW,
        take=None,
        render=render_acceptance,
    ),
)
