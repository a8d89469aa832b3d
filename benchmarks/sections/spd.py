"""SPD (Wang et al., 2026): Tables 1, 2 and 5 beside ours, in-flight correction, and the value of drafters' time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.costs import hop_floor, spd_overhead
from benchmarks.drafters import correction, halfway
from benchmarks.papers import drafter_time, spd_correction, spd_hybrid, spd_recipes, spd_rejection, spd_tables
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared import virtual
from benchmarks.shared.measured import Taken, stored
from penstock.lab.common import bounds, markdown, times

CELLS = tuple(
    spd_tables.cell_key(temperature, width) for width in spd_tables.WIDTHS for temperature in spd_tables.TEMPERATURES
)
"""The columns of a row, in the paper's order."""
GOAL = 1.10
"""Ratio that in-flight correction is to reach on `spd-8`."""
Row = tuple[tuple[float, ...], ...]
"""Acceptance length and, where drafting takes time, theoretical speed-up, in the order of ``CELLS``."""

MEAN: dict[str, Row] = {
    "eagle3 n=4 Ls=1": ((2.70, 2.47), (2.22, 2.03), (3.01, 2.75), (2.88, 2.63)),
    "eagle3 n=8 Ls=1": ((3.32, 2.72), (2.51, 2.06), (4.40, 3.61), (3.40, 2.79)),
    "eagle3 n=16 Ls=1": ((3.51, 2.39), (2.65, 1.80), (4.90, 3.33), (3.58, 2.44)),
    "early_exit n=4 Ls=1": ((1.67, 1.49), (1.49, 1.33), (1.73, 1.54), (1.82, 1.62)),
    "early_exit n=8 Ls=1": ((1.93, 1.54), (1.63, 1.31), (1.86, 1.49), (2.09, 1.67)),
    "early_exit n=16 Ls=1": ((1.93, 1.29), (1.65, 1.10), (1.77, 1.18), (2.02, 1.35)),
    "spd n=4 Ls=1": ((2.08,), (1.91,), (2.17,), (2.33,)),
    "spd n=4 Ls=2": ((2.19,), (2.02,), (2.28,), (2.48,)),
    "spd n=4 Ls=4": ((2.29,), (2.10,), (2.40,), (2.65,)),
    "spd n=8 Ls=1": ((2.46,), (2.24,), (2.53,), (2.88,)),
    "spd n=8 Ls=2": ((2.72,), (2.49,), (2.81,), (3.28,)),
    "spd n=8 Ls=4": ((2.82,), (2.56,), (2.91,), (3.43,)),
    "spd n=16 Ls=1": ((2.62,), (2.33,), (2.64,), (3.13,)),
    "spd n=16 Ls=2": ((2.83,), (2.48,), (2.84,), (3.44,)),
    "spd n=4 Ls=2 output states": ((2.61, 2.09), (2.50, 2.00), (2.70, 2.16), (2.96, 2.36)),
    "spd n=8 Ls=2 output states": ((3.31, 2.20), (3.09, 2.06), (3.40, 2.27), (4.10, 2.73)),
    "spd n=16 Ls=2 output states": ((3.66, 1.83), (3.28, 1.64), (3.69, 1.84), (4.78, 2.39)),
}
"""Qwen3.5-4B, mean of MT-Bench, GSM8K and HumanEval: Table 1, and with output states Table 2."""
HUMANEVAL: dict[str, Row] = {
    "eagle3 n=4 Ls=1": ((2.83, 2.58), (2.40, 2.19), (3.25, 2.97), (3.01, 2.75)),
    "eagle3 n=8 Ls=1": ((3.56, 2.92), (2.79, 2.29), (4.64, 3.81), (3.90, 3.20)),
    "eagle3 n=16 Ls=1": ((3.86, 2.63), (3.05, 2.08), (5.37, 3.66), (4.08, 2.78)),
    "early_exit n=4 Ls=1": ((1.84, 1.63), (1.60, 1.42), (1.91, 1.70), (1.95, 1.73)),
    "early_exit n=8 Ls=1": ((2.35, 1.88), (1.85, 1.48), (2.28, 1.83), (2.46, 1.97)),
    "early_exit n=16 Ls=1": ((2.26, 1.51), (1.83, 1.22), (2.07, 1.38), (2.33, 1.56)),
    "spd n=4 Ls=1": ((2.35,), (2.12,), (2.42,), (2.51,)),
    "spd n=4 Ls=2": ((2.71,), (2.43,), (2.79,), (2.90,)),
    "spd n=4 Ls=4": ((2.88,), (2.51,), (2.97,), (3.09,)),
    "spd n=8 Ls=1": ((2.93,), (2.57,), (3.04,), (3.21,)),
    "spd n=8 Ls=2": ((3.77,), (3.38,), (3.88,), (4.28,)),
    "spd n=8 Ls=4": ((3.97,), (3.33,), (4.06,), (4.50,)),
    "spd n=16 Ls=1": ((3.24,), (2.84,), (3.30,), (3.67,)),
    "spd n=16 Ls=2": ((4.04,), (3.27,), (4.13,), (4.69,)),
}
"""Qwen3.5-4B on HumanEval: Table 5."""

# --------------------------------------------------------------------------------------------------------------- tables


def render_tables(figures: Any) -> str:
    headings = ["", *CELLS]
    rows = [cells for key in in_order(figures) for cells in table_rows(key, figures)]
    return paragraphs(
        "Acceptance length / theoretical speed-up. For SPD from input states they are the same, L', as long as its "
        "module takes no longer than a stage (L_s at most L / n, section 3.4); one with more layers makes every step "
        "wait for it, and the speed-up is L' x L / (n L_s). The paper's rows: "
        "Qwen3.5-4B, mean of MT-Bench, GSM8K and HumanEval and, in brackets, HumanEval, the one that is code as ours "
        "is (Tables 1 and 5; with output states Table 2, which has the mean only). [Tables 3 and "
        "4](#spd-tables-3-and-4) are MT-Bench and GSM8K: the demo target knows nothing but Python. W = 1 is a chain, "
        "W = 4 four branches of four children, T = 1 with top-k 50. Ours accept by the noise that target and drafter "
        "share, the paper's by rejection sampling, which for the one candidate of W = 1 at T = 1 accepts more: with "
        "the demo pair 69% against 64% ([acceptance rules](strategies.md#pipedec-fig-3-and-acceptance-rules)). From "
        "four candidates on, the shared noise does.",
        markdown(headings, rows),
        "L' is taken in ideal lockstep, as the paper's is: stages of equal speed, drafts in time, no links. L is the "
        f"paper's 32, in the theory of ours too; the demo target has 16 layers. {identical(figures)} Speed-up over the "
        "plain pipeline on the presets `spd-4`, `spd-8` and `spd-16`, with the stages', the module's and the links' "
        "modelled times and, in brackets, 95% bounds:",
        markdown(headings, preset_rows(figures)),
    )


def preset_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    return [
        [label(key), *(f"{times(one['preset'])} ({bounds(one['bounds'])})" for one in cells_of(figures[key]))]
        for key in in_order(figures)
        if key in figures
    ]


def in_order(figures: Mapping[str, Any]) -> list[str]:
    """The paper's rows and ours that it lacks, by method, stages and layers; methods that we lack are left out."""
    measured = {(row["method"], row["output_states"]) for row in figures.values()}
    published = [key for key in MEAN if (key.split()[0], key.endswith("states")) in measured]
    found = dict.fromkeys([*published, *figures])
    return sorted(found, key=lambda key: (spd_tables.METHODS.index(key.split()[0]), key.endswith("states"), sizes(key)))


def sizes(key: str) -> tuple[int, int]:
    """Stages and layers of a row."""
    stages, layers = (int(part.split("=")[1]) for part in key.split()[1:3])
    return stages, layers


def table_rows(key: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    if key in MEAN:
        code = HUMANEVAL.get(key)
        means = [slashed(mean) for mean in MEAN[key]]
        yield [f"paper: {label(key)}", *(f"{m} ({slashed(code[i])})" if code else m for i, m in enumerate(means))]
    if key in figures:
        values = [tuple(dict.fromkeys((one["length"], one["theoretical"]))) for one in cells_of(figures[key])]
        yield [f"ours: {label(key)}", *(f"**{slashed(one)}**" for one in values)]


def cells_of(row: Mapping[str, Any]) -> list[Any]:
    return [row["cells"][name] for name in CELLS]


def slashed(values: tuple[float, ...]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def label(key: str) -> str:
    name, (stages, layers) = key.split()[0], sizes(key)
    if name == "eagle3":
        return f"EAGLE-3, m = {stages - 1}"
    words = {"early_exit": "early exit (PPSD)", "spd": "SPD"}[name]
    return f"{words}, n = {stages}, L_s = {layers}{', output states' if key.endswith('states') else ''}"


def identical(figures: Mapping[str, Any]) -> str:
    wrong = [key for key, row in figures.items() if not all(one["identical"] for one in cells_of(row))]
    return f"NOT identical to plain decoding: {', '.join(wrong)}." if wrong else "All outputs identical."


# --------------------------------------------------------------------------------------------------------------- hybrid


def render_hybrid(figures: Any) -> str:
    headings = ["", *CELLS]
    return paragraphs(
        "The same with a target whose layers are of the paper's kind. It is of Qwen3.5's architecture: 8 layers, 6 of "
        "them gated delta nets, and 4.6M parameters, distilled from the demo target over 0.6M tokens of its training "
        "text (held-out loss 3.38, the demo target's 2.02). The module has one layer and has seen 0.3M "
        "tokens: the target's token is among its best 1, 4 and 16 in 53, 81 and 94% of those held out. Both were made "
        "by `python scripts/train_hybrid.py --threads 1` in 18 minutes of a shared core. That shows that such trees "
        "run over such layers, not what SPD gives where target and module are fully trained.",
        markdown(headings, [cells for key in figures for cells in table_rows(key, figures)]),
        f"{identical(figures)} Speed-up over the plain pipeline on the presets, with modelled times:",
        markdown(headings, preset_rows(figures)),
    )


# -------------------------------------------------------------------------------------------------------------- recipes


def render_recipes(figures: Any) -> str:
    rows = [
        [f"`{key.split()[0]}`", row["stages"], row["layers"], *(f"{row['lengths'][cell]:.2f}" for cell in CELLS)]
        for key, row in figures.items()
    ]
    same = all(row["identical"] for row in figures.values())
    return paragraphs(
        "L' in ideal lockstep, as in the table of all methods. `paper-4` and `paper-8` are of the variant `paper`, "
        "each trained for its own number of stages as the paper trains them; `anchors` is the default variant, one "
        "module for 4, 8 and 16 stages, which share its training. The pipeline's fill was drawn for every sequence. "
        "All of these saw the same 1.2M tokens, a ninth of the files that the target was trained on, once, in steps "
        "of 1,024. So did `eagle3-small-steps`; `eagle3` is the shipped one, which has seen 3.1M in steps of 4,096:",
        markdown(["", "n", "L_s", *CELLS], [[str(value) for value in row] for row in rows]),
        "A module for one n was better over four stages, not over eight. `paper-8` has the learning rate and the draft "
        "vocabulary of the shipped module, 0.0015 and 3,072 tokens; those of the other two were not kept. EAGLE-3 "
        "drafts n - 1 levels before each trip; more tokens have taught it more than smaller steps did, so that the "
        "tables of all methods keep the shipped one. "
        f"{'All outputs identical' if same else 'NOT all outputs identical'} to plain decoding.",
    )


# ------------------------------------------------------------------------------------------------------------ rejection


def render_rejection(figures: Any) -> str:
    rows = [
        [
            rejection_label(key),
            *(f"{100 * row[rule]['accepted']:.1f}% / {row[rule]['length']:.2f}" for rule in spd_rejection.RULES),
            f"{row['rejection']['length'] / row['shared noise']['length']:.3f}",
        ]
        for key, row in figures.items()
    ]
    return paragraphs(
        "Tokens accepted at T = 1 with top-k 50 and one candidate (W = 1), and the acceptance length L' that follows "
        "from them, where a hit takes one step of the full pipeline and a miss takes n. Held-out code that the demo "
        "target has sampled, read by SPD's module after a token that has just entered. By the paper's rule a token "
        "drawn from the module's distribution is accepted with the chance min(1, p / q).",
        markdown(["", "shared noise (ours)", "rejection sampling (the paper's)", "L', theirs over ours"], rows),
        "A request that begins, or goes on after a miss, has no full pipeline: L' as the table of all methods counts "
        "it, in steps, is 6 to 7% lower.",
    )


def rejection_label(key: str) -> str:
    """The label of a row; the ``paper`` variant is trained for its own n."""
    variant, _, rest = key.rpartition(", ")
    return label(rest) + (", trained for this n alone" if variant else "")


# ----------------------------------------------------------------------------------------------------------- correction


def render_correction(figures: Any) -> str:
    rows = [
        [
            f"`{cluster}`, {name.replace('=', ' = ')}",
            f"{one['off']:.3f}",
            f"{one['on']:.3f}",
            f"{one['ratio']:.3f} ({bounds(one['bounds'])})",
            "yes" if one["identical"] else "NO",
        ]
        for cluster, row in figures.items()
        for name, one in row["temperatures"].items()
    ]
    return paragraphs(
        "`continuous` with SPD's module on held-out code: tokens per stage time without the corrections that the "
        "module gives for tokens under way, with them, and the ratio of the speeds, paired, with 95% bounds.",
        markdown(["", "not corrected", "corrected", "ratio", "identical"], rows),
    )


def render_simulated_correction(figures: Any) -> str:
    stages = next(iter(figures.values()))["stages"]
    rows = [
        [
            f"`{cluster}`",
            f"{row['again']:.2f}, {row['kept']:.2f}",
            *("{:.3f} ({}-{})".format(*one) for one in row["ratios"]),
        ]
        for cluster, found in figures.items()
        for row in found["corrected"]
    ]
    return paragraphs(
        "What corrections are worth by how good they are: speed of `continuous` with them over without, eight requests "
        "of 100 tokens, with 95% bounds, over so many stages like the first of each preset. Once a token has passed "
        "half of them its best candidate is right in the first share of the cases in which it was wrong, and still "
        "right in the second share of those in which it was right. The last row of each is the bound. A drafter on "
        "`spd-8` takes almost as long as a stage, one on `pipedec-14x3090` a third.",
        markdown(["stages like", "again, kept", *map(str, stages)], rows),
    )


def render_halfway(figures: Any) -> str:
    curve = figures["curve"]
    shares = list(curve[-1]["shares"])
    rows = [
        [
            f"{point['learned']:,}",
            *(f"{100 * one['again']:.1f}, {100 * one['kept']:.1f}" for one in point["shares"].values()),
        ]
        for point in curve
    ]
    return paragraphs(
        "What a module would have to know to correct a token half-way, and what the target's own states tell it there. "
        "A head of one layer over the whole vocabulary was trained for that alone: it reads the demo target's states "
        "after 8 of 16 layers, and learns the target's distribution after so many tokens, each seen once, the rate "
        "falling to zero at the end. SPD's module, for a token that has just entered eight stages, has the target's "
        f"greedy token of {figures['tokens']:,} held-out ones in {100 * figures['first']:.1f}%. Where it has not, the "
        "share, in percent, in which the head then has it (again); where it has, the share in which the head has it, "
        "too (kept). The first answer's log chances count so many times beside the head's:",
        markdown(["tokens learned", *(f"{share}: again, kept" for share in shares)], rows),
        bound(curve[-1]["shares"]) + " " + growth(curve),
    )


def growth(curve: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the gain in "again" by each doubling of the tokens, the missing part, and how far away it is."""
    best = [max(one["again"] for one in point["shares"].values()) for point in curve]
    gains = [after - before for before, after in pairwise(best)]
    needed = again_for(GOAL)
    each = ", ".join(f"{100 * gain:.1f}" for gain in gains)
    slow, fast = (curve[-1]["learned"] / 1e6 * 2 ** ((needed - best[-1]) / gain) for gain in (fmean(gains), gains[-1]))
    return (
        f"Each doubling of the tokens has lifted the first share, by {each} points in turn. {GOAL:.2f} takes about "
        f"{100 * needed:.0f}%, with nine tenths of the second. If further doublings gave as much as these in the mean, "
        f"that would take {slow:,.0f} million tokens, and {fast:,.0f} million if they gave as much as the last: "
        "reckoned, not measured."
    )


def again_for(goal: float) -> float:
    """How often simulated corrections have to be right again for this ratio on `spd-8`, interpolated in the stored
    rows."""
    rows = [(row["again"], ratio[0]) for row, ratio in simulated_rows()]
    (low, below), (high, above) = next(pair for pair in pairwise(rows) if pair[0][1] < goal <= pair[1][1])
    return float(low + (high - low) * (goal - below) / (above - below))


def simulated_rows() -> list[tuple[Mapping[str, Any], Sequence[float]]]:
    """Rows and ratios with bounds on `spd-8` with as many stages as the head was trained for, in ascending order."""
    simulated = stored(correction.NAME).figures["spd-8"]
    place = simulated["stages"].index(halfway.STAGES)
    return [(row, row["ratios"][place]) for row in simulated["corrected"]]


def bound(shares: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence on the upper bound of such a head, from simulated corrections that know as much or more."""
    again = max(one["again"] for one in shares.values())
    above, (ratio, low, high) = next((row, found) for row, found in simulated_rows() if row["again"] >= again)
    return (
        f"However the two are weighed, the head is right again in at most {100 * again:.0f}%. The least good "
        f"[simulated corrections](#in-flight-correction-simulated) that are as often right again are so in "
        f"{100 * above['again']:.0f}%, keep {100 * above['kept']:.0f}%, and make {ratio:.3f} on `spd-8` with "
        f"{halfway.STAGES} stages ({low:.2f} to {high:.2f}). So a head that has learned so much gives no more than "
        f"that: not {GOAL:.2f}."
    )


# ------------------------------------------------------------------------------------------------------------- overhead


ADDED = ("step, ms", "added, ms", "step / (step + added)")


SOCKETS = {"ipc": "Unix-domain sockets", "tcp": "tcp over loopback"}


def added_cells(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['step_ms']:.2f}", f"{row['added_ms']:.2f}", f"{row['share']:.3f}"]


def render_overhead(figures: Any) -> str:
    rows = [
        [
            f"`{row['cluster']}`, `feature_lag` {row['lag']}",
            *added_cells(row),
            f"{row['each_ms'][0]:.2f} to {row['each_ms'][-1]:.2f}",
            f"{1 - spd_overhead.LOST[row['cluster']]:.2f}",
            f"{row['overruns']:.1%}",
            "yes" if row["identical"] else "NO",
        ]
        for row in figures.values()
    ]
    return paragraphs(
        "A chain drafted by SPD's module at T = 0 on held-out code. What a step takes longer in emulated processes "
        "than in virtual time, for the same tokens, with what the devices compute stretched until this host's own "
        "arithmetic fits into it, and the links as they are; beside the step as the preset has it: the "
        f"median of {spd_overhead.REPEATS} runs, and what was added in each. Measured as root, so that what keeps "
        "time comes before what else runs on the host ([what runs where](../architecture.md#what-runs-where)). SPD's "
        "repository is what its own code reaches of its theory.",
        markdown(["", *ADDED, "each, ms", "SPD's repository", "overruns", "identical"], rows),
    )


def take_hop_floor() -> Taken:
    return ["python -m benchmarks.costs.hop_floor"], hop_floor.measured()


def render_hop_floor(figures: Any) -> str:
    rows = [[f"`{row['cluster']}`, {SOCKETS[row['transport']]}", *added_cells(row)] for row in figures]
    return paragraphs(
        "The same with stages that do nothing but wait and hand a frame of 1 kB on, in a ring that is as full as a "
        "pipeline can be, with our inboxes and sockets: no model, no tree and no drafter. Two cores of a shared host.",
        markdown(["", *ADDED], rows),
    )


# --------------------------------------------------------------------------------------------------------- drafter time


def render_drafter_time(figures: Any) -> str:
    names = [f"{width}, {temperature}" for width in ("W=1", "W=4") for temperature in ("T=0", "T=1")]
    rows = []
    for key, row in figures.items():
        found = [row["widths"][width][temperature] for width, temperature in (name.split(", ") for name in names)]
        passes = sum(one["passes"] for one in found)
        rows.append(
            [
                f"`{key}`",
                *(f"{one['accepted'] / one['ms']:.2f}" for one in found),
                f"{sum(one['ms'] for one in found) / passes:.2f}",
            ]
        )
    return paragraphs(
        "`pipedec` over four stages, as a chain (W = 1) and with four branches of four children (W = 4): drafted "
        "tokens that were accepted per millisecond of processor time that the drafter took, its prompts included. "
        "The first row is the demo pair's small draft model.",
        markdown(["drafter", *names, "ms per pass"], rows),
    )


SECTIONS = (
    Section(name=spd_tables.NAME, title="SPD, Tables 1, 2 and 5", how=virtual.HOW, take=None, render=render_tables),
    Section(
        name=spd_recipes.NAME,
        title="SPD's module for one number of stages or for all",
        how=virtual.HOW,
        take=None,
        render=render_recipes,
    ),
    Section(
        name=spd_hybrid.NAME,
        title="SPD on gated delta nets",
        how=spd_hybrid.HOW,
        take=None,
        render=render_hybrid,
    ),
    Section(
        name=spd_rejection.NAME,
        title="SPD's length by both rules of acceptance",
        how=virtual.HOW,
        take=None,
        render=render_rejection,
    ),
    Section(
        name=correction.NAME,
        title="In-flight correction, simulated",
        how=correction.HOW,
        take=None,
        render=render_simulated_correction,
    ),
    Section(
        name=halfway.NAME,
        title="What is known half-way",
        how=halfway.HOW,
        take=None,
        render=render_halfway,
    ),
    Section(
        name=spd_correction.NAME,
        title="In-flight correction",
        how=virtual.HOW,
        take=None,
        render=render_correction,
    ),
    Section(
        name=spd_overhead.NAME,
        title="SPD's steps in processes",
        how=spd_overhead.HOW,
        take=None,
        render=render_overhead,
    ),
    Section(
        name="hop_floor",
        title="Messages alone",
        how="Measured, without a model",
        take=take_hop_floor,
        render=render_hop_floor,
    ),
    Section(
        name=drafter_time.NAME,
        title="Accepted tokens per millisecond of drafter time",
        how=drafter_time.HOW,
        take=None,
        render=render_drafter_time,
    ),
)
