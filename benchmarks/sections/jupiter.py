"""Beside Jupiter's paper: Tables II, IV and V, figures 10 to 12, and prompts in planned pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any, Final

from benchmarks.papers import jupiter
from benchmarks.papers.jupiter import IN_TABLE_5
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared.points import ASKING, TITLE
from benchmarks.strategies import planned_hosts, plans
from penstock.lab.common import markdown, times
from penstock.lab.papers import METHODS
from penstock.lab.plan_choices import EVEN, JUPITER, PROPORTIONAL

TABLE_2: Final = {
    "7B": {"100 Mbps": (8.16, 6.96, 3.48, 5.19), "1 Gbps": (0.92, 0.88, 0.45, 0.69)},
    "13B": {"100 Mbps": (5.71, 6.06, 3.03, 4.63), "1 Gbps": (0.73, 0.81, 0.38, 0.56)},
}
"""Time of exchanging over time of computing for a prompt: SP, TP, DT, Galaxy."""
TABLE_4: Final = {
    ("A", "100 Mbps"): ((53.5, 431.2, 228.5, 427.6, 42.2, 16.5), (None, 503.4, 270.1, 496.5, 66.2, 26.3)),
    ("A", "500 Mbps"): ((37.4, 106.9, 66.4, 103.9, 39.0, 15.2), (None, 130.1, 83.4, 125.0, 63.4, 25.2)),
    ("A", "1 Gbps"): ((35.4, 66.4, 46.1, 65.0, 38.6, 14.9), (None, 83.4, 60.1, 81.3, 63.1, 24.9)),
    ("B", "100 Mbps"): ((63.1, 491.2, 288.6, 458.3, 59.3, 22.4), (None, 624.5, 391.2, 566.4, 102.4, 38.8)),
    ("B", "500 Mbps"): ((47.0, 167.0, 126.4, 142.9, 56.1, 21.4), (None, 251.2, 204.5, 208.0, 99.7, 37.3)),
    ("B", "1 Gbps"): ((44.8, 126.4, 106.2, 104.9, 55.7, 20.9), (None, 204.5, 181.2, 165.7, 98.3, 36.8)),
}
"""Seconds for 260 + 64 tokens, 7B and 13B: SP, M-LM, DT, Galaxy, EdgeShard, Jupiter; None is out of memory."""
TABLE_5: Final = {"7B": (1.8, 2.3, 3.6), "13B": (2.0, 2.4, 3.9)}
"""Speed-up over naive decoding for each of the paper's ways."""
PAPERS_WAYS: Final = ("chain", "outlines", "both")
WAYS: Final = (*PAPERS_WAYS, "auto", "both, auto")
GOAL: Final = 0.85
"""Fraction of N times one stage's speed that is aimed at."""
PUBLISHED: Final = (*METHODS, "EdgeShard", "Jupiter")


def render(figures: Any) -> str:
    settings = figures["settings"]
    return paragraphs(
        "The boards are the presets `jupiter-homogeneous` (A) and `jupiter-heterogeneous` (B). By *formula* as many "
        "elements are exchanged as the paper's Table I says, without latency; by *rings* those that really cross a "
        "device's link. EdgeShard is the plain pipeline with the paper's layer split. Jupiter's column of ours has its "
        "layer split, its pieces of the prompt and Medusa's chain, but no outlines, which have a table of their own. "
        "Penstock's has the plan of `penstock plan`, planned pieces and `auto`.",
        "**Table II**, exchanging over computing of the prompt, A.",
        ratios(settings),
        "**Table IV**, seconds for 260 prompt tokens and 64 new ones.",
        totals(settings),
        "M-LM's published seconds fit a token that moves 76 MB; its all-reduces of one token move about 1 MB. By bytes "
        "the advantage over tensor parallelism is far smaller than published, and where links are fast there is none: "
        "Galaxy, whose exchanges are reckoned as entirely hidden behind computing, would be ahead of any pipeline here "
        "from 500 Mbps on. Out of memory are replicas of 13B, on every board of either environment. A replica of 7B "
        "does not fit the Nano alone (4 GB; the paper's Table III says 8): SP is reckoned as if it did.",
        "**Figures 10 and 11**, milliseconds per token: of the prompt, and of the new ones, by rings.",
        phases(settings),
        "**Figure 12**, 7B on one to four Xavier NX: seconds, by rings.",
        by_boards(figures["boards"]),
        "Of these three figures the paper states ranges alone. How many times as long the others take as Jupiter, and "
        "as Penstock by rings, over all settings:",
        reductions(figures),
        "**Table V**, decoding on A at 1 Gbps over naive decoding.",
        table_5(figures["answers"]),
        f"The answer has {IN_TABLE_5.points} points of {IN_TABLE_5.tokens} tokens, the prompt {IN_TABLE_5.prompt}: the "
        f"paper states none of them. A title is taken to have {TITLE} tokens, and what asks for a point {ASKING}. An "
        "answer's tokens are its points'; the outline's time counts. Answers of other shapes, with 7B's times, over "
        "naive decoding:",
        shapes(figures["answers"]),
        limits(figures["answers"]),
        "**Prompts in pieces**: seconds until the first token, in planned pieces and in fixed ones.",
        pieces(figures["prompts"]),
        f"Planned pieces are never slower than the best fixed length of 16 to 512 (at most {worst(figures['prompts'])} "
        "of its time), and no length is the best everywhere.",
        "**Prompts over N equal stages**, planned, over one stage with all of the model, and in brackets N p / (p + N "
        "- 1) of p pieces of 16 tokens, which is what filling and draining the pipeline leave.",
        scaled(figures["stages"]),
        scaling_remark(figures["stages"]),
    )


def of(settings: list[Any], **wanted: str) -> Iterator[Any]:
    yield from (one for one in settings if all(one[key] == value for key, value in wanted.items()))


def ratios(settings: list[Any]) -> str:
    rows = []
    for one in of(settings, environment="A"):
        paper = TABLE_2[one["model"]].get(one["rate"], (None,) * 4)
        row = [f"{one['model']}, {one['rate']}"]
        for name, published in zip(METHODS, paper, strict=True):
            both = [one["baselines"][name][counted]["ratio"] for counted in ("formula", "rings")]
            row.append(" / ".join(["-" if published is None else f"{published:.2f}", *(f"{x:.2f}" for x in both)]))
        rows.append(row)
    return markdown(["paper / formula / rings", *METHODS], rows)


def total(found: Mapping[str, Any]) -> float:
    return float(found["prompt_s"] + found["tokens_s"])


def totals(settings: list[Any]) -> str:
    rows = []
    for one in settings:
        published = TABLE_4[one["environment"], one["rate"]][one["model"] == "13B"]
        row = [f"{one['environment']}, {one['model']}, {one['rate']}"]
        for name, paper in zip(PUBLISHED, published, strict=True):
            row.append(f"{'OOM' if paper is None else f'{paper:g}'} / {ours(one, name)}")
        rows.append([*row, ours(one, "Penstock")])
    return markdown(["paper / formula / rings, or paper / ours", *PUBLISHED, "Penstock"], rows)


def ours(one: Mapping[str, Any], name: str, counted: Sequence[str] = ("formula", "rings")) -> str:
    if name in METHODS:
        return " / ".join(
            "OOM" if lacking(one, name) else f"{total(one['baselines'][name][way]):.1f}" for way in counted
        )
    return f"{total(one['pipelines'][name]):.1f}" if one["pipelines"] else "OOM"


def lacking(one: Mapping[str, Any], name: str) -> bool:
    """Whether a baseline is out of memory on more than the Nano."""
    return len(one["baselines"][name]["lacking"]) > 1


def phases(settings: list[Any]) -> str:
    rows = []
    for one in of(settings, model="7B"):
        row = [f"{one['environment']}, {one['rate']}"]
        for name in (*PUBLISHED, "Penstock"):
            found = one["baselines"][name]["rings"] if name in METHODS else one["pipelines"][name]
            prompt, token = found["prompt_s"] / jupiter.PROMPT, found["tokens_s"] / jupiter.TOKENS
            row.append(f"{1e3 * prompt:.0f} + {1e3 * token:.0f}")
        rows.append(row)
    return markdown(["7B, prompt + new", *PUBLISHED, "Penstock"], rows)


def by_boards(boards: list[Any]) -> str:
    rows = [
        [f"{one['boards']} NX, {one['rate']}", *(ours(one, name, ["rings"]) for name in (*PUBLISHED, "Penstock"))]
        for one in boards
    ]
    return markdown(["", *PUBLISHED, "Penstock"], rows)


def reductions(figures: Any) -> str:
    """The paper's ranges of figures 10 to 12 beside ours: least and most, or the most alone."""
    both = ("prompt_s", "tokens_s")
    rows = []
    for row, (least, most), name, phases_s in (
        ("prompt, figures 10 and 11", (1.4, 7.4), "settings", both[:1]),
        ("new tokens, figures 10 and 11", (2.9, 33.2), "settings", both[1:]),
        ("both, figure 12", (None, 23.7), "boards", both),
    ):
        found = [
            sorted(times_as_long(figures[name], phases_s, over, counted))
            for over, counted in (("Jupiter", "formula"), ("Jupiter", "rings"), ("Penstock", "rings"))
        ]
        paper = f"up to {most}" if least is None else f"{least} to {most}"
        rows.append([row, paper, *(f"{one[0]:.1f} to {one[-1]:.1f}" for one in found)])
    return markdown(["", "paper", "formula", "rings", "Penstock"], rows)


def times_as_long(settings: list[Any], phases_s: Sequence[str], over: str, counted: str) -> Iterator[float]:
    """Ratio of times over ``over`` for every baseline that fits, and for EdgeShard."""
    for one in settings:
        base = sum(one["pipelines"][over][phase] for phase in phases_s)
        others = [one["baselines"][name][counted] for name in METHODS if not lacking(one, name)]
        yield from (
            sum(other[phase] for phase in phases_s) / base for other in (*others, one["pipelines"]["EdgeShard"])
        )


def table_5(answers: list[Any]) -> str:
    rows = [
        [
            one["model"],
            *(f"{gain:.1f}x" for gain in TABLE_5[one["model"]]),
            *(times(over_naive(one, way)) for way in WAYS),
        ]
        for one in answers
        if is_table_5(one)
    ]
    papers = [f"paper: {way}" for way in PAPERS_WAYS]
    return markdown(["", *papers, *(f"ours: {quoted(way)}" for way in WAYS)], rows)


def quoted(way: str) -> str:
    return way.replace("auto", "`auto`")


def is_table_5(shape: Mapping[str, Any]) -> bool:
    return (shape["points"], shape["tokens"]) == (IN_TABLE_5.points, IN_TABLE_5.tokens)


def over_naive(shape: Mapping[str, Any], way: str) -> float:
    return float(shape["seconds"]["naive"] / shape["seconds"][way])


def shapes(answers: list[Any]) -> str:
    rows = [
        [f"{one['points']} of {one['tokens']} tokens", *(times(over_naive(one, way)) for way in WAYS)]
        for one in of(answers, model="7B")
    ]
    return markdown(["points", *map(quoted, WAYS)], rows)


def limits(answers: list[Any]) -> str:
    """A remark on the outline's share of an answer of Table V's shape, and on `auto` and the chain with the most
    points."""
    (one,) = (other for other in of(answers, model="7B") if is_table_5(other))
    share, both = (one["outline_s"][way] / one["seconds"][way] for way in ("outlines", "both"))
    most = max(of(answers, model="7B"), key=lambda other: (other["points"], other["tokens"]))
    chain, auto = (times(over_naive(most, way)) for way in ("both", "both, auto"))
    return (
        "What limits them is the outline, whose tokens come one after another: in Table V's shape it takes "
        f"{100 * share:.0f}% of the time, with the chain {100 * both:.0f}%. Fewer than four points leave boards idle; "
        "more share batches, which costs these boards nothing up to 11 rows. A pipeline that points keep busy leaves "
        f"speculation less to win: with {most['points']} points `auto` reaches {auto} and the chain {chain}."
    )


def scaled(stages: list[Any]) -> str:
    counts = sorted({one["stages"] for one in stages})
    rows = []
    for tokens in sorted({one["tokens"] for one in stages}):
        found = {one["stages"]: one for one in stages if one["tokens"] == tokens}
        cells = (f"{found[count]['speedup']:.2f} ({found[count]['bound']:.2f})" for count in counts)
        rows.append([f"{tokens:,} tokens", *cells])
    return markdown(["", *(f"N = {count}" for count in counts)], rows)


def scaling_remark(stages: list[Any]) -> str:
    below = [one for one in stages if one["speedup"] < GOAL * one["stages"]]
    least = min(one["speedup"] / one["stages"] for one in stages if one not in below)
    slower = [one["speedup"] / one["of_8"] for one in stages]
    names = " and ".join(
        f"{one['tokens']:,} tokens over {one['stages']} stages ({one['speedup'] / one['stages']:.2f} N, of at most "
        f"{one['bound'] / one['stages']:.2f} N)"
        for one in below
    )
    return (
        f"That is at least {least:.2f} N, but for {names}. Pieces of 8 tokens would raise that bound, and take "
        f"{min(slower):.1f} to {max(slower):.1f} times as long as the planned ones: a stage reads its weights for each "
        "piece, which takes as long as 11 rows do."
    )


def pieces(prompts: list[Any]) -> str:
    rows = []
    for one in prompts:
        if one["rate"] == "500 Mbps":
            continue  # between the others
        fixed = {int(length): seconds for length, seconds in one["fixed_s"].items()}
        best = min(fixed, key=lambda length: fixed[length])
        name = f"{one['environment']}, {one['rate']}, {one['tokens']}"
        each = [f"{fixed[length]:.2f}" for length in (16, 128, 512)]
        rows.append([name, f"{one['planned_s']:.2f}", *each, f"{fixed[best]:.2f} ({best})"])
    return markdown(["environment, rate, tokens", "planned", "16", "128", "512", "best fixed"], rows)


def worst(prompts: list[Any]) -> str:
    return f"{max(one['planned_s'] / min(one['fixed_s'].values()) for one in prompts):.4f}"


def headline(figures: Any) -> tuple[str, str]:
    gains = [total(one["pipelines"]["Jupiter"]) / total(one["pipelines"]["Penstock"]) for one in figures["settings"]]
    question = (
        "Jupiter's boards as modelled, 260 + 64 tokens: our plan, pieces and `auto` over its plan, pieces and chain"
    )
    return question, times(geometric_mean(gains))


def render_plans(figures: Any) -> str:
    """The speed-up of our plans as a distribution."""
    rows = []
    for other in (EVEN, PROPORTIONAL, JUPITER):
        found = plans.gains(figures, other)
        cuts = [found[round(share * (len(found) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)]
        rows.append([other, str(len(found)), *map(times, cuts), times(geometric_mean(found))])
    fewer = sum(one["used"] < one["devices"] for one in figures)
    return paragraphs(
        f"{len(figures)} clusters: the presets, and {plans.RANDOM} drawn at random with 2 to 8 stages. {plans.TOKENS} "
        f"tokens of two requests each, behind {plans.PROMPT}, with `auto`. How many times as soon a whole answer is "
        "there as with other plans, where they fit at all:",
        markdown(["over", "clusters", "least", "25%", "median", "75%", "most", "mean"], rows),
        f"The plan leaves devices out on {fewer} of the clusters.",
    )


def render_hosts(figures: Any) -> str:
    """Seconds of a question by way and split, and the speed-up by planning."""
    rows = []
    for way in planned_hosts.WAYS:
        even, planned = (figures["seconds"][f"{way}, {split}"] for split in ("even", "planned"))
        gain = median(one / other for one, other in zip(even, planned, strict=True))
        layers = (figures["layers"][f"{way}, {split}"] for split in ("even", "planned"))
        rows.append([way, *layers, f"{median(even):.2f}", f"{median(planned):.2f}", times(gain)])
    return paragraphs(
        "SmolLM2-135M from a GGUF file of 4 bits, on three workers of one thread each: one with a core to itself, two "
        "that share a core with a process that never rests, the second of them with a lower priority. "
        f'`layer_split="auto"` has measured them as they are. {len(planned_hosts.PROMPTS)} questions of no special '
        f"kind, {figures['tokens']} tokens each, both splits by turns; the tokens are the same. *auto* has prompt "
        "lookup, which seldom finds anything in such answers.",
        markdown(["", "even", "planned", "even, s", "planned, s", "planned is"], rows),
    )


SECTIONS = (
    Section(name=planned_hosts.NAME, title="Planned hosts", how=planned_hosts.HOW, take=None, render=render_hosts),
    Section(name=plans.NAME, title="Planned splits", how=plans.HOW, take=plans.take, render=render_plans),
    Section(name=jupiter.NAME, title="Jupiter, Tables II, IV and V", how=jupiter.HOW, take=jupiter.take, render=render),
)
