"""PipeDec (Yin et al., 2025) on its own cluster: section 4.3 beside ours. The text has no numbers of figures 3 to 8 but
those quoted here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.papers import long_text, pipedec_departures, pipedec_throughput, pipedec_transfers
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared.measured import Taken
from benchmarks.shared.simulations import LABELS, SAMPLINGS, Figures, find, ms, over, percent, said, simulated, source
from penstock.cluster import draft_timing, load_cluster
from penstock.cluster.spec import llama
from penstock.lab.common import markdown, times

CLUSTER, PLAIN, STATIC = "pipedec-14x3090", "autoregressive", "static_tree"
CLUSTERS = {"pipedec-7": 7, CLUSTER: 14, "pipedec-21": 21}
WIDTHS, CHILDREN = (8, 16, 32, 64, 128), (2, 4, 8, 16)
SMALL_8B = {"layers": 32, "hidden": 4096, "intermediate": 14336, "key_value": 1024, "vocabulary": 128256, "bits": 32}
"""Sizes from the config.json of meta-llama/Llama-3.1-8B, in fp32 like the 70B."""

# ------------------------------------------------------------------------------------------------------------ figure 4


def take_tree() -> Taken:
    commands, figures = [], {}
    sweep = ["--sweep", "width=8..128,children=2..16"]
    for name, tokens in (("T0", 1500), ("profile", 1000)):
        command, runs = simulated([CLUSTER], ["pipedec"], [*sweep, *source(name, tokens)])
        commands.append(command)
        figures[name] = [run for run in runs if run["settings"]]
    return commands, figures


def render_tree(figures: Any) -> str:
    parts = [
        "The paper (section 4.3.1, 14 stages, mean of six data sets): with the width, latency first falls and then "
        "rises while accuracy rises steadily; more children help, with gains that level off; 32 wide with 16 "
        "children is taken as best. The figure's numbers are not in the text.",
        "Ours: milliseconds per token, the fewest in bold, and accuracy. Cells a few percent apart are not told "
        "apart by so few requests.",
    ]
    for name, runs in figures.items():
        parts.append(f"{drafter(name)}, {runs[0]['tokens']:,} tokens:")
        cells = {(run["settings"]["width"], run["settings"]["children"]): run for run in runs}
        best = min(cells, key=lambda key: cells[key]["ms_per_token"])
        rows = [
            [f"{width} wide", *(cell_of(cells[width, count], (width, count) == best) for count in CHILDREN)]
            for width in WIDTHS
        ]
        parts.append(markdown(["", *(f"{count} children" for count in CHILDREN)], rows))
    return paragraphs(*parts)


def cell_of(run: Figures, best: bool) -> str:
    time = f"**{ms(run)}**" if best else ms(run)
    return f"{time}, {percent(run['hit_rate'])}"


def drafter(name: str) -> str:
    return "Synthetic profile" if name == "profile" else f"The demo pair on held-out code, {LABELS[name]}"


# ------------------------------------------------------------------------------------------------------ figures 5 and 6


def take_stages() -> Taken:
    commands, figures = [], {}
    strategies = [PLAIN, STATIC, f"{STATIC}[tree_size=48]", "pipedec", "auto"]
    for name, tokens in (("T0", 10_000), ("profile", 4000)):
        command, figures[name] = simulated(list(CLUSTERS), strategies, source(name, tokens))
        commands.append(command)
    return commands, figures


def render_stages(figures: Any) -> str:
    table = [
        ["PipeDec, 14 stages, over PP", "6.17x (4.46x to 7.79x)"],
        ["PipeDec, 14 stages, over STPP", "2.53x (2.2x to 2.69x)"],
        ["PipeDec, 14 stages over 7", "nearly 1.64x"],
        ["PipeDec, 21 stages over 14", 'gains "plateau or degrade"'],
        ["an 8B model on one L40 over PipeDec, 14 stages", 'PipeDec "approaches or even surpasses" it for some tasks'],
        ["Penstock's `auto`, 14 stages, over PP", ""],
        ["Penstock's `auto`, 14 stages, over PipeDec", ""],
    ]
    columns = [ratios(runs) for runs in figures.values()]
    rows = [[*line, *(column[i] for column in columns)] for i, line in enumerate(table)]
    headings = ["", "the paper, mean (range over six data sets)", *map(drafter, figures)]
    return paragraphs(
        "The paper (sections 1 and 4.3.2): greedy, Llama-3.1-70B with Llama-3.2-1B, against the plain pipeline "
        "(PP), a static tree (STPP) and an 8B model alone (SLM). Its radar chart of accuracies (Fig. 6) has no "
        "numbers in the text, which says that PipeDec's are above STPP's and stay high as trees grow deeper.",
        markdown(headings, rows),
        "Ranges of ours are 95% bounds over requests. STPP is the better of 48 and 64 nodes, six layers deep; the "
        "paper does not state its tree. By its two means the paper's STPP is 2.4x PP; ours is "
        f"{' and '.join(static_over_plain(runs) for runs in figures.values())}. The paper does not define STPP's "
        "accuracy; ours leaves out, for every strategy, tokens after a node from which nothing was drafted. The 8B "
        "model is reckoned, not simulated: "
        f"{1e3 * small_model_seconds():.1f} ms per token in fp32, from the L40's bandwidth. What differs from the "
        "paper: the texts are code only, the models are ours and agree as they do, and with the profile acceptance "
        "is what the profile says.",
        *(by_stages(name, runs) for name, runs in figures.items()),
    )


def ratios(runs: list[Figures]) -> list[str]:
    """One column: ours beside the paper's."""
    seven, fourteen, more = ({run["strategy"]: run for run in runs if run["cluster"] == name} for name in CLUSTERS)
    pipedec, auto = fourteen["pipedec"], fourteen["auto"]
    return [
        said(over(pipedec, fourteen[PLAIN])),
        said(over(pipedec, best_static(fourteen))),
        said(over(pipedec, seven["pipedec"])),
        said(over(more["pipedec"], pipedec)),
        f"{pipedec['ms_per_token'] / (1e3 * small_model_seconds()):.2f}x",
        said(over(auto, fourteen[PLAIN])),
        said(over(auto, pipedec)),
    ]


def static_over_plain(runs: list[Figures]) -> str:
    fourteen = {run["strategy"]: run for run in runs if run["cluster"] == CLUSTER}
    return times(over(best_static(fourteen), fourteen[PLAIN]).mean)


def best_static(runs: dict[str, Figures]) -> Figures:
    return min((run for name, run in runs.items() if name.startswith(STATIC)), key=lambda run: run["ms_per_token"])


def small_model_seconds() -> float:
    """Seconds per token of Llama-3.1-8B alone on the drafter's device."""
    timing = draft_timing(replace(load_cluster(CLUSTER), draft_as_model=llama(**SMALL_8B)))
    assert timing is not None
    return timing.seconds(1)


def by_stages(name: str, runs: list[Figures]) -> str:
    strategies = list(dict.fromkeys(run["strategy"] for run in runs))
    rows = [
        [f"`{strategy}`", *(time_and_hits(find(runs, strategy, cluster)) for cluster in CLUSTERS)]
        for strategy in strategies
    ]
    headings = [f"{drafter(name)}: ms per token, accuracy", *(f"{stages} stages" for stages in CLUSTERS.values())]
    return markdown(headings, rows)


def time_and_hits(run: Figures) -> str:
    return ", ".join(filter(None, (ms(run), percent(run["hit_rate"]))))


# ------------------------------------------------------------------------------------------- figure 7 and the demo pair

WIDE = ("pipedec[width=16]", "pipedec", "pipedec[width=48]", "pipedec[width=64]", "pipedec[width=128]")
DEMO_PAIR = (PLAIN, STATIC, f"{STATIC}[tree_size=48]", "flowspec", *WIDE, "continuous", "auto")


def take_demo_pair() -> Taken:
    commands, figures = [], {}
    for name in SAMPLINGS:
        command, figures[name] = simulated([CLUSTER], DEMO_PAIR, source(name))
        commands.append(command)
    return commands, figures


def render_demo_pair(figures: Any) -> str:
    tokens = ", ".join(f"{runs[0]['tokens']:,} at {LABELS[name]}" for name, runs in figures.items())
    rows = [[f"`{name}`", *(speed_and_hits(find(runs, name)) for runs in figures.values())] for name in DEMO_PAIR[1:]]
    rows.append(["`auto` over the best `pipedec`", *(said(over_best(runs)) for runs in figures.values())])
    table = markdown(["over the plain pipeline, accuracy", *(LABELS[name] for name in figures)], rows)
    return paragraphs(
        f"Fourteen stages; tokens: {tokens}, outputs that fall into a loop left out.",
        table,
        'The paper (section 4.3.3, Fig. 7) compares T = 0 with T = 0.6, top-p 0.9, top-k 80 and finds "minimal '
        'increases in latency and slight decreases in accuracy", without numbers in the text. '
        + sampled_over_greedy(figures),
        "The goal is 1.2x the best `pipedec`.",
    )


def speed_and_hits(run: Figures) -> str:
    return f"{run['speedup']:.2f}x, {percent(run['hit_rate'])}"


def over_best(runs: list[Figures]) -> Any:
    best = min((find(runs, name) for name in WIDE), key=lambda run: sum(run["seconds"]))
    return over(find(runs, "auto"), best)


def sampled_over_greedy(figures: Any) -> str:
    """A sentence on the cost of sampling."""
    words = []
    for name, label in (("pipedec", "PipeDec"), (STATIC, "STPP")):
        greedy, warm = (find(figures[part], name) for part in ("T0", "T0.6"))
        slower = warm["ms_per_token"] / greedy["ms_per_token"] - 1
        words.append(
            f"{label} takes {abs(slower):.0%} {'more' if slower > 0 else 'less'} time per token when sampling so, with "
            f"accuracy {percent(warm['hit_rate'])} instead of {percent(greedy['hit_rate'])}"
        )
    return f"Ours: {'; '.join(words)}. The texts differ between the columns."


# ------------------------------------------------------------------------------------------------- figures 3 and 8


def render_long_text(figures: Any) -> str:
    rows = [
        [label, *(f"{100 * share:.1f}" for share in figures[name].values())]
        for name, label in (("long", "long"), ("short", f"texts of {long_text.SHORT} tokens"))
    ]
    return paragraphs(
        "The paper (section 3.3, Fig. 3) has Llama-3.1-8B guess the 70B's greedy tokens on a text of 30,000 tokens and "
        'on one of 80: the best 8 candidates hold them with an accuracy that "approached 1", and no other number is in '
        f"the text. Ours: the draft model's best k on {figures['tokens']:,} tokens of one file that the demo pair has "
        "not been trained on, `transformers.generation.utils`. Both models were trained on sequences of "
        f"{long_text.CONTEXT} tokens, so the long text is read in windows of that length; short are the same tokens in "
        f"texts of {long_text.SHORT}. Share of tokens, in percent:",
        markdown(["", *(f"k = {k}" for k in long_text.CANDIDATES)], rows),
    )


def render_throughput(figures: Any) -> str:
    counts = list(dict.fromkeys(row["at_once"] for row in figures["rows"]))
    rows = [
        [f"`{strategy}`, {how}", *(rate_of(figures, strategy, how, count) for count in counts)]
        for strategy, how in pipedec_throughput.ROWS
    ]
    fewest, most = (sum(bound) for bound in zip(pipedec_throughput.PROMPT, pipedec_throughput.ANSWER, strict=True))
    return paragraphs(
        "The paper (section 4.3.4, Fig. 8): twelve samples, k of them at once, 4 GB of each GPU beside the parameters "
        'and batches of at most eight, where PipeDec "achieved a throughput similar to STPP"; with more memory PP and '
        "STPP are expected to overtake it. The figure's numbers are not in the text.",
        f"Ours: twelve requests of {fewest} to {most} tokens with their answers, {figures['sets']} sets; tokens per "
        "second and, in brackets, times PipeDec's with 95% bounds. The paper does not say whether its batches follow "
        "one another. Together: all requests are one batch, which goes through all stages before the next one enters. "
        "Apart: each enters as it is ready. PipeDec has one request at a time.",
        markdown(["k at once", *map(str, counts)], rows),
        "With all requests in one batch PipeDec is level with PP at eight and ahead of STPP, whose rows then take the "
        "stages longer than reading their weights: so the paper's figure comes out. With requests apart STPP overtakes "
        "it by four at once and PP by eight, and the memory does not keep them from it: 4 GB hold the keys and values "
        f"of {figures['fit']:,} tokens of six layers in fp32, and eight requests need {8 * most:,}. What binds is the "
        "batch of eight, so that twelve at once are as fast as eight.",
    )


def rate_of(figures: Any, strategy: str, how: str, at_once: int) -> str:
    wanted = (strategy, how, at_once)
    row = next(row for row in figures["rows"] if (row["strategy"], row["how"], row["at_once"]) == wanted)
    over = row["over_pipedec"]
    ratio = f" ({over['mean']:.2f}x, {over['low']:.2f} to {over['high']:.2f})" if over else ""
    return f"{row['tokens_per_second']:.1f}{ratio}"


def render_transfers(figures: Any) -> str:
    rows = [
        [
            f"`{one['cluster']}`" + (f", {one['gbit_s']:g} Gbit/s between hosts" if one["gbit_s"] else ""),
            f"{one['ms_per_token']:.1f}",
            "{:.4f} ({:.4f} to {:.4f})".format(*one["exclusive"]),
        ]
        for one in figures
    ]
    return paragraphs(
        "The paper's nodes send or receive one thing at a time (algorithms 2 and 3). Here links have that property, "
        "`links.exclusive`, or are full duplex, as Penstock's are; `pipedec` decodes the same six requests of 60 "
        "tokens both ways. Of `flowspec-7b` every board is a host.",
        markdown(["", "full duplex, ms per token", "exclusive, times as long (95%)"], rows),
    )


def render_departures(figures: Any) -> str:
    rows = [
        [
            f"`{one['cluster']}`",
            f"{one['ms_per_token']:.1f}",
            *("{:.3f} ({:.3f} to {:.3f})".format(*one[variant]) for variant in pipedec_departures.VARIANTS),
        ]
        for one in figures
    ]
    return paragraphs(
        "A layer of the tree enters when the tree has fewer layers than there are stages; one more would wait in the "
        "first stage's buffer, chosen before the last pruning. Where pruning leaves none of the last layer, the paper "
        f"waits for a miss; ours grows on from the deepest live nodes. {pipedec_departures.REQUESTS} requests of "
        f"{pipedec_departures.TOKENS} tokens, and how many times as long they take the other way:",
        markdown(["", "`pipedec`, ms per token", "one layer more (95%)", "waiting for a miss (95%)"], rows),
    )


SECTIONS = (
    Section(
        name=pipedec_departures.NAME,
        title="PipeDec, two departures: the tree's depth, and growing on",
        how=pipedec_departures.HOW,
        take=None,
        render=render_departures,
    ),
    Section(
        name=pipedec_transfers.NAME,
        title="PipeDec, algorithms 2 and 3: one transfer at a time",
        how=pipedec_transfers.HOW,
        take=None,
        render=render_transfers,
    ),
    Section(
        name=long_text.NAME,
        title="PipeDec, Fig. 3, on a text of 30,000 tokens",
        how=long_text.HOW,
        take=None,
        render=render_long_text,
    ),
    Section(
        name=pipedec_throughput.NAME,
        title="PipeDec, Fig. 8: throughput in 4 GB and batches of eight",
        how=pipedec_throughput.HOW,
        take=None,
        render=render_throughput,
    ),
    Section(
        name="pipedec_tree",
        title="PipeDec, Fig. 4: the tree's width and children",
        how="Simulated, from a recording of the demo pair and with the synthetic profile",
        take=take_tree,
        render=render_tree,
    ),
    Section(
        name="pipedec_stages",
        title="PipeDec, Fig. 5 and 6: 7, 14 and 21 stages",
        how="Simulated, from a recording of the demo pair and with the synthetic profile",
        take=take_stages,
        render=render_stages,
    ),
    Section(
        name="pipedec_demo_pair",
        title="PipeDec, Fig. 7, and every strategy at 14 stages: greedy and sampled",
        how="Simulated, from recordings of the demo pair",
        take=take_demo_pair,
        render=render_demo_pair,
    ),
)
