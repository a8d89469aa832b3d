"""Drafters trained for a real model: how they learn, and how often they are right on six prompt sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.drafters import drafter_acceptance, learning
from benchmarks.drafters.drafter_acceptance import shares, together
from benchmarks.sections.base import Section, paragraphs
from benchmarks.sections.real_model import SETS
from penstock.lab.common import markdown

RECIPE = (
    "penstock train KIND --model SmolLM2 --data chats.jsonl --dtype bfloat16 --max-length 512 --batch-tokens 512 "
    "--draft-vocab-size 8192 --learning-rate 1e-3"
)
EARLIER = (
    "penstock train KIND --model SmolLM2 --self-generate 512 --temperatures 0,0.7,1 --max-length 512 "
    "--draft-vocab-size 8192"
)
FLOAT32 = "float32"


def render_learning(figures: Mapping[str, Any]) -> str:
    return paragraphs(
        "SmolLM2-135M-Instruct wrote 812 conversations with itself, 181,761 tokens of their answers to be learned, "
        "half of these at T = 0, the others at 0.7 and 1. It went on from its chat template's opening, as "
        "`--self-generate` has it, but in a loop outside Penstock that keeps 96 conversations under way: 0.27 hours of "
        "processor time. The target's hidden states took 0.07. Drafters then learned from it in bfloat16: "
        f"`{RECIPE}`. EAGLE-3 has four `--ttt-steps`, Medusa four `--heads`; SPD's module has two `--spec-layers` and "
        "is of `--variant paper`.",
        f"The rows in float32 are earlier ones, of 512 conversations, 150,518 tokens of answers: `{EARLIER}`, EAGLE-3 "
        "with four `--ttt-steps`, SPD's module with two `--spec-layers`, for two `--stages` by anchors. Writing took "
        "0.4 hours, the states 0.1. Percent of held-out tokens, at T = 0, among the best 1, 4 and 16 candidates:",
        markdown(
            ["drafter", "in", "tokens a step", "learning rate", "steps", "minutes of one core", "best 1 / 4 / 16"],
            [learning_row(one) for one in figures.values()],
        ),
        "![Shares of held-out tokens over the tokens read](../../images/learning.png)",
        "Of the held-out tokens 6% cannot be drafted at all, since they are not among the 8,192 of the draft "
        "vocabulary; of the earlier text's 11%. Sets that were held out differ with the texts.",
    )


def learning_row(one: Mapping[str, Any]) -> list[str]:
    settings, (steps, _, *shares) = one["settings"], one["entries"][-1]
    which = {"exit_layer": "behind layer {}", "stages": "{} stages"}
    told = [text.format(one_of(settings[name])) for name, text in which.items() if name in settings]
    return [
        ", ".join([f"`{settings['kind']}`", *told]),
        settings.get("dtype", FLOAT32),
        str(settings["batch_tokens"]),
        f"{settings['learning_rate']:g}",
        str(steps),
        f"{60 * one['hours']:.0f}",
        " / ".join(f"{100 * share:.0f}" for share in shares),
    ]


def one_of(value: Any) -> Any:
    """The element of a list with one element; any other value itself."""
    return value[0] if isinstance(value, list) else value


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
        "ranked with the target's own noise. `ngram` is prompt lookup; the others are those of [how drafters "
        "learn](#how-drafters-learn), SPD's module the one for 4 stages, the early exit the one behind layer 19, which "
        "alone has a state of the newest token: it drafts when the first of two stages is done. `all` is of "
        f"{one_row(one)} tokens: it may be {chance(one_row(one)):.0f} points off by chance, a set's more than twice "
        "that.",
        markdown(["drafter", "T", *SETS.values(), "all"], rows),
        "The same, of all sets, where no state of the target's is known of the last one or two tokens: there is what "
        "EAGLE-3 has made of them, and Medusa's next heads know nothing of them:",
        markdown(
            ["drafter", "T", "one further", "two further"][:width],
            [row + ["-"] * (width - len(row)) for row in later],
        ),
    )


def one_row(figure: Mapping[str, Any]) -> int:
    """Number of tokens that a row of the table is based on."""
    return max(together(sets)[0] for sets in figure["temperatures"].values())


def chance(tokens: int) -> float:
    """Two standard errors of a share of one in four, in percent."""
    return 200 * (0.25 * 0.75 / tokens) ** 0.5


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
