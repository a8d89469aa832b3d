"""Penstock's parts against alternatives: acceptance rules, other strategies, a hopeless drafter, the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared import virtual
from benchmarks.shared.commands import command_line, penstock, with_json_file, with_json_output
from benchmarks.shared.measured import Taken
from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import LABELS, RECORDINGS, SAMPLINGS, find, recording, simulated
from benchmarks.strategies import always_wrong, auto_against, parts, restart, same_texts, several_sources, shared_host
from penstock.cluster import load_cluster
from penstock.lab.acceptance import LABELS as RULES
from penstock.lab.common import markdown

# ------------------------------------------------------------------------------------------------ acceptance, figure 3


def take_acceptance() -> Taken:
    command, content = with_json_output(["acceptance", *(recording(name) for name in SAMPLINGS)])
    names = ("tokens", "requests", "looping")
    figures = {
        name: {
            **{part: one[part] for part in names},
            "rules": {
                rule: {k: round(figure["value"], 4) for k, figure in shares.items()}
                for rule, shares in one["rules"].items()
            },
        }
        for name, one in zip(SAMPLINGS, content["recordings"], strict=True)
    }
    return [command], figures


def render_acceptance(figures: Any) -> str:
    counts = list(next(iter(figures["T0"]["rules"].values())))
    rows = [
        [f"{LABELS[name]}: {RULES[rule]}", *(f"{100 * shares[k]:.1f}" for k in counts)]
        for name, one in figures.items()
        for rule, shares in one["rules"].items()
    ]
    tokens = ", ".join(f"{one['tokens']:,} at {LABELS[name]}" for name, one in figures.items())
    return paragraphs(
        "The paper (section 3.3, Fig. 3), greedy: Llama-3.1-8B's best 8 candidates hold the 70B's token with "
        'an accuracy that "approached 1", on a text of 30,000 tokens and one of 80; no other number is in the '
        "text.",
        f"Ours: the share of steps, in percent, in which one of k drafts is accepted; tokens: {tokens}, outputs "
        "that fall into a loop left out; standard errors of about one point. Beside Penstock's rule, which ranks "
        "candidates with the target's own noise, those of the papers.",
        markdown(["", *(f"k = {k}" for k in counts)], rows),
        "For one draft rejection sampling accepts more when sampling; from four candidates on the "
        "shared noise does, and a tree has more than four.",
    )


# ------------------------------------------------------------------------------------------------------- auto against


def render_auto_against(figures: Any) -> str:
    if not figures:
        return "Not measured since `auto` was last changed."
    rows = [
        [
            f"`{cluster}`",
            str(one["stages"]),
            f"{one['over_plain']:.2f}x",
            f"{one['over_papers']:.2f}x `{one['papers']}`",
            interval([one["ratio"], one["low"], one["high"]]),
            f"`{one['best']}`",
        ]
        for cluster, one in figures.items()
    ]
    requests = sorted({one["requests"] for one in figures.values()})
    counts = " or ".join(map(str, requests))
    below = sum(one["low"] < auto_against.GOAL for one in figures.values())
    whole = len(auto_against.SETTINGS) - 1
    again = sum(one["settings"] < whole for one in figures.values())
    headings = ["cluster", "stages", "over plain", "over the papers' best", "over the best of all (95%)", "which"]
    return paragraphs(
        f"{counts} requests of {auto_against.TOKENS} tokens each. On {len(figures)} clusters, `auto` as it is "
        f"against the best of {whole} settings of every other strategy, chosen on the same requests, which favours "
        f"them. The lower bound is below {auto_against.GOAL:g} on {below} of them.",
        markdown(headings, rows),
        f"On {again} of them `auto`, `continuous` and the papers' best setting were run once more after a change of "
        "the first two; the other settings, which it does not touch, are those of the sweep before.",
    )


# ---------------------------------------------------------------------------------------------------------- same texts


def take_same_texts() -> Taken:
    (figures,) = same_texts.measured([str(ROOT / recording("T1"))]).values()
    return ["python -m benchmarks.strategies.same_texts"], figures


def render_same_texts(figures: Any) -> str:
    shares = [
        [label, *(f"{100 * share:.1f}" for share in hits)]
        for label, hits in zip(("T = 0", "T = 1"), figures["hits"], strict=True)
    ]
    clusters = figures["clusters"]
    rows = [
        [f"`{name}`", *(interval(clusters[cluster][name]) for cluster in clusters)] for name in same_texts.STRATEGIES
    ]
    return paragraphs(
        "A greedy run and a sampled one write different texts, and how well a drafter knows the text outweighs how its "
        f"candidates are ranked. Here both decode the same: the {figures['tokens']:,} tokens that the demo pair wrote "
        "at T = 1, sampled as they were recorded, or with what greedy decoding would pick after each of them. The "
        "share of tokens, in percent, that are among the drafter's best k candidates:",
        markdown(["", *(f"k = {k}" for k in same_texts.CANDIDATES)], shares),
        "Speed at T = 1 over that at T = 0, the geometric mean over requests with 95% bounds:",
        markdown(["", *(f"`{cluster}`" for cluster in clusters)], rows),
    )


def interval(ratio: Sequence[float]) -> str:
    mean, low, high = ratio
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


# ------------------------------------------------------------------------------------------------------- always wrong


def take_always_wrong() -> Taken:
    return ["python -m benchmarks.strategies.always_wrong"], always_wrong.measured()


def render_always_wrong(figures: Any) -> str:
    rows = [
        [f"`{strategy}`, {when}", *(f"{ratio_of(figures[cluster][strategy]):.3f}" for cluster in figures)]
        for strategy in always_wrong.STRATEGIES
        for when, ratio_of in (
            ("first request", lambda ratios: ratios[0]),
            ("the next ones", lambda ratios: max(ratios[1:])),
        )
    ]
    return paragraphs(
        "Three requests of 200 tokens each, drafts as confident as the profile's and never right: time over plain "
        "decoding.",
        markdown(["", *(f"`{cluster}`" for cluster in figures)], rows),
    )


# --------------------------------------------------------------------------------------------------- several sources


def render_several_sources(figures: Any) -> str:
    rows = [
        [
            f"`{name.partition(', ')[0]}`, {name.partition(', ')[2]}, {temperature.replace('=', ' = ')}",
            *(f"{cell[source]:.2f}x" for source in several_sources.SOURCES),
            f"{cell['ratio']:.2f} ({'-'.join(f'{bound:.2f}' for bound in cell['bounds'])})",
            "yes" if cell["identical"] else "NO",
        ]
        for name, row in figures.items()
        for temperature, cell in row["temperatures"].items()
    ]
    headings = ["`auto`, over plain decoding", "`ngram`", "`draft_model`", "both", "over the better", "identical"]
    return paragraphs(
        'Prompt lookup beside the demo pair\'s small model (`"method": ["draft_model", "ngram"]`), and each alone; in '
        "the fifth column both over the better of the two, paired, with 95% bounds. Copies: prompts hold a piece of "
        "held-out code and its first half again. Other text: the pieces alone. Where both are slower than the better, "
        "the bounds include 1.",
        markdown(headings, rows),
    )


# ------------------------------------------------------------------------------------------------------------- restart


def render_restart(figures: Any) -> str:
    ways = ("nothing", *restart.HOSTS)
    rows = [
        [name, *("{:.3f} ({:.3f} to {:.3f})".format(*one[way]) for way in ways), f"{one['bytes']:,}"]
        for name, one in figures.items()
    ]
    return paragraphs(
        "`auto` on the four stages of `demo`, all on one host of two cores. An engine answers nine requests; what it "
        "keeps is written and read as a restart does. Then a further request comes, of 100 tokens: first on an engine "
        "that knows nothing (`PENSTOCK_FORGET=1`), first on one that begins with what was kept, and tenth on the "
        "engine of the nine. Time of the first two over the last, paired, with 95% bounds. What was kept may also be "
        "from when the host was half or twice as fast: the first plain token says so, and all kept times count by it.",
        markdown(
            [
                "drafts",
                "knows nothing",
                "begins with what was kept",
                "kept at half the speed",
                "at twice the speed",
                "bytes kept",
            ],
            rows,
        ),
        "What is left to the tenth request: plain decoding is measured anew, on one token in place of three.",
    )


# ------------------------------------------------------------------------------------------------------------- parts


def render_parts(figures: Any) -> str:
    variants = list(next(iter(figures.values())))
    rows = [[variant, *(f"{speeds[variant]:.2f}x" for speeds in figures.values())] for variant in variants]
    return paragraphs(
        "Twenty requests of 100 tokens; speed over the plain pipeline, with one part of `continuous` left out at a "
        "time. A cell's error is about 2%.",
        markdown(["", *(f"`{cluster}`" for cluster in figures)], rows),
    )


# ---------------------------------------------------------------------------------------------- simulator and emulator

SAMPLE = ("demo", "flowspec-7b", "pipedec-7")
COMPARED = ("autoregressive", "static_tree", "pipedec", "auto")
SIZES = virtual.Sizes(prompts=2, tokens=48)


def take_simulator() -> Taken:
    texts = ["--num-prompts", str(SIZES.prompts), "--max-tokens", str(SIZES.tokens), "--temperature", "1"]
    scales = {"pipedec-7": ["--time-scale", "3"]}  # this host is too slow for the real computation otherwise
    RECORDINGS.mkdir(exist_ok=True)
    file = str((RECORDINGS / "two.safetensors").relative_to(ROOT))
    tree = "autoregressive,static_tree[tree_size=8]"
    recorded = ["bench", "--model", "demo", "-pp", "1", "--strategies", tree, *texts, "--record", file]
    penstock(recorded)
    commands, figures = [command_line(recorded)], []
    for cluster in SAMPLE:
        scale = scales.get(cluster, [])
        bench = ["bench", "--model", "demo", "--cluster", cluster, "--strategies", ",".join(COMPARED), *texts, *scale]
        command, content = with_json_file(bench)
        stretched = float(scale[1]) if scale else 1.0
        again, runs = simulated([cluster], COMPARED, ["--recording", file])
        commands += [command, again]
        virtually = drafted_for_real(cluster)
        for run in content["runs"]:
            name, hop = run["strategy"], run["overhead_per_hop_ms"] / stretched
            more = ["--recording", file, "--overhead-per-hop-ms", f"{hop:.3f}"]
            again, added = simulated([cluster], [name], more)
            commands.append(again)
            figures.append(
                {
                    "cluster": cluster,
                    "strategy": name,
                    "emulated_ms": 1e3 / run["tokens_per_second"] / stretched,
                    "simulated_ms": find(runs, name)["ms_per_token"],
                    "with_hops_ms": find(added, name)["ms_per_token"],
                    "virtual_ms": virtually[name],
                    "overruns": run["overrun_fraction"],
                    "valid": run["valid"],
                    "hop_ms": run["overhead_per_hop_ms"],
                }
            )
    return commands, figures


def drafted_for_real(cluster: str) -> dict[str, float]:
    """Milliseconds per token by strategy, of the same requests in virtual time, with real drafts."""
    questions = virtual.asked(SIZES, (1.0,))
    drafter = {"method": "draft_model", "model": "demo"}
    runs = virtual.compared(load_cluster(cluster), drafter, COMPARED[1:], questions)
    return {run.strategy: 1e3 * run.seconds / run.tokens for run in runs}


def render_simulator(figures: Any) -> str:
    rows = []
    for cluster, some in groupby(figures, key=lambda run: run["cluster"]):
        for i, run in enumerate(some):
            rows.append(
                [
                    f"`{cluster}`" if i == 0 else "",
                    f"`{run['strategy']}`",
                    f"{run['emulated_ms']:.1f}",
                    f"{run['simulated_ms']:.1f}",
                    f"{run['with_hops_ms']:.1f}",
                    f"{run['emulated_ms'] / run['with_hops_ms']:.2f}",
                    f"{drafted_ms(run):.1f}",
                    f"{run['emulated_ms'] / drafted_ms(run):.2f}",
                    f"{run['overruns']:.1%}{'' if run['valid'] else ': not valid'}",
                    f"{run['hop_ms']:.2f}",
                ]
            )
    headings = ["", "", "emulated, ms per token", "simulated", "with overhead", "ratio", "with real drafts", "ratio"]
    return paragraphs(
        "The same two prompts of 48 tokens at T = 1: in stage processes, and simulated from a recording of them, "
        "without and with the overhead that the processes had per hop. The sample (three presets, four strategies) was "
        "chosen before looking.",
        markdown([*headings, "overruns", "per hop, ms"], rows),
        f"With the overhead the valid figures of strategies that do not learn agree within "
        f"{farthest(figures, simulated_ms, False):.1%}. What is left is the drafts: a recording has none off the "
        "target's path, and a simulation takes one on it in their place. With the drafter's own answers, which real "
        f"models give in virtual time, they agree within {farthest(figures, drafted_ms, False):.1%}. `auto` agrees "
        f"within {farthest(figures, simulated_ms, True):.1%} and {farthest(figures, drafted_ms, True):.1%}: what it "
        "enters depends on moments, so that no two runs of it are the same, and two short requests hold few misses.",
    )


def simulated_ms(run: Mapping[str, Any]) -> float:
    return float(run["with_hops_ms"])


def drafted_ms(run: Mapping[str, Any]) -> float:
    """Milliseconds per token with real drafts, plus the simulator's estimate of the overhead."""
    return float(run["virtual_ms"] + run["with_hops_ms"] - run["simulated_ms"])


def farthest(figures: Any, modelled_ms: Callable[[Mapping[str, Any]], float], learns: bool) -> float:
    """Greatest relative difference between emulation and model, where the emulation is valid."""
    some = [run for run in figures if run["valid"] and (run["strategy"] == "auto") is learns]
    return max(abs(run["emulated_ms"] / modelled_ms(run) - 1) for run in some)


# ------------------------------------------------------------------------------------------------------ a shared host

SHARED = {
    "ngram": "prompt lookup",
    "right": "synthetic, right in 88% of the steps",
    "wrong": "synthetic, never right",
    "itself": "itself in `int8`, as draft model",
    "random": "a draft model with random weights",
    **{f"right{percent}": f"synthetic, right in {percent}%" for percent in shared_host.PERCENT},
}


def over_plain(figures: Any, entry: str) -> str:
    ratio = shared_host.ratio_over(figures["seconds"].values(), shared_host.ENTRIES[0], entry)
    return f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def least_of_sets(figures: Any, entry: str) -> float:
    return min(sum(by["autoregressive"]) / sum(by[entry]) for by in figures["seconds"].values())


def render_shared_host(figures: Any) -> str:
    def cells(key: str) -> list[str]:
        one, case = figures[key], key.removesuffix(shared_host.IN_INT4)
        drafter = case.removesuffix(shared_host.BUSY)
        sets = one["seconds"].values()
        plain = sum(len(by["autoregressive"]) for by in sets) * (one["tokens"] - 1)
        speed = plain / sum(sum(by["autoregressive"]) for by in sets)
        auto, again = (f"{least_of_sets(one, entry):.2f}" for entry in ("auto", shared_host.AGAIN))
        ratios = [over_plain(one, "auto"), auto, again, over_plain(one, "continuous")]
        host = "one core busy" if drafter != case else "quiet"
        weights = "`int4`" if case != key else "float32"
        return [weights, SHARED[drafter], host, str(one["per_set"]), f"{speed:.1f}", *ratios]

    sizes = next(iter(figures.values()))
    keys = [case + suffix for suffix in ("", shared_host.IN_INT4) for case in shared_host.CASES]
    headings = [
        "weights",
        "drafter",
        "host",
        "chats a set",
        "plain, tokens/s",
        "`auto`",
        "least of the sets",
        "plain again, least",
        "`continuous`",
    ]
    return paragraphs(
        "SmolLM2-135M-Instruct as two stage processes of one thread each on two cores, greedily; of each of "
        f"six prompt sets the first chats, {sizes['tokens']} tokens each. Speed over plain "
        'decoding of the same prompt, all in turn, with 95% bounds. "One core busy": beside a process that computes. '
        "`auto` begins as new in every row, so that its first trials count. Each prompt is decoded plainly a second "
        'time; the least of the six sets by that, "plain again", is what chance does to a set.',
        markdown(headings, [cells(key) for key in keys if key in figures]),
        "`continuous` does as told. `auto` falls back to plain decoding where that is faster. Both stages read their "
        "weights from one memory and slow each other, so that batches go one after another "
        "([in turn](../strategies.md#what-continuous-does)), and what speculation gains is the rows that each holds. "
        "Processors differ in what a row of floats costs them: here, on an AMD EPYC (Zen 4), torch reads the weights "
        "for one row at 11 GB/s, and a plain token takes 47 ms. On a processor where it took 22 ms the model that "
        "drafts with itself made 2.37 (2.12 to 2.66) by `auto`. In `int4` our own code computes.",
    )


SECTIONS = (
    Section(
        name="acceptance",
        title="PipeDec, Fig. 3, and acceptance rules",
        how="Computed from recordings of the demo pair",
        take=take_acceptance,
        render=render_acceptance,
    ),
    Section(
        name="auto_against",
        title="`auto` against every other strategy's best setting",
        how="Simulated, with the synthetic profile",
        take=None,
        render=render_auto_against,
    ),
    Section(
        name="same_texts",
        title="Greedy and sampled on the same texts",
        how="Simulated, from a recording of the demo pair",
        take=take_same_texts,
        render=render_same_texts,
    ),
    Section(
        name="always_wrong",
        title="A drafter that is always wrong",
        how="Simulated, with the synthetic profile's confidence",
        take=take_always_wrong,
        render=render_always_wrong,
    ),
    Section(
        name=several_sources.NAME,
        title="A drafter and prompt lookup together",
        how=virtual.HOW,
        take=None,
        render=render_several_sources,
    ),
    Section(
        name=restart.NAME,
        title="The first request after a restart",
        how=restart.HOW,
        take=None,
        render=render_restart,
    ),
    Section(
        name=parts.NAME,
        title="What each part of continuous is worth",
        how=parts.HOW,
        take=None,
        render=render_parts,
    ),
    Section(
        name="simulator",
        title="Simulator against emulator",
        how="Emulated and simulated, with the demo pair",
        take=take_simulator,
        render=render_simulator,
    ),
    Section(
        name="shared_host",
        title="Stages that share a host",
        how=shared_host.HOW,
        take=None,
        render=render_shared_host,
    ),
)
