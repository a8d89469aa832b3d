"""PipeDec (Yin et al., 2025) on its own cluster, section 4.3 beside ours: simulated, and in processes. The text has no
numbers of figures 3 to 8 but those quoted here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.papers import pipedec_bound, pipedec_seeds, pipedec_setting, pipedec_throughput, tensor_groups
from benchmarks.sections.base import Section, by_script
from benchmarks.shared.commands import with_json_file
from benchmarks.shared.measured import Taken
from benchmarks.shared.profile import ACCURACY
from benchmarks.shared.simulations import (
    LABELS,
    SAMPLING,
    SAMPLINGS,
    Figures,
    find,
    ms,
    over,
    percent,
    said,
    simulated,
    source,
)
from penstock.cluster import draft_timing, load_cluster, plain_step_seconds, stage_timings
from penstock.cluster.spec import llama
from penstock.lab.grid import PLAIN
from penstock.lab.report import times

CLUSTER, STATIC = "pipedec-14x3090", "static_tree"
CLUSTERS = ("pipedec-7", CLUSTER, "pipedec-21")
SMALL_8B = llama(layers=32, hidden=4096, intermediate=14336, key_value=1024, vocabulary=128256, bits=32)
"""Sizes from the config.json of meta-llama/Llama-3.1-8B, in fp32 like the 70B."""
DRAFTERS = {
    "profile": "Synthetic profile",
    **{name: f"The demo pair on held-out code, {LABELS[name]}" for name in SAMPLINGS},
}
WIDE = ("pipedec[width=16]", "pipedec", "pipedec[width=48]", "pipedec[width=64]", "pipedec[width=128]")
DEMO_PAIR = (PLAIN, STATIC, f"{STATIC}[tree_size=48]", "flowspec", *WIDE, "continuous", "auto")


def simulations(
    clusters: Sequence[str], strategies: Sequence[str], sources: Mapping[str, int], more: Sequence[str] = ()
) -> tuple[list[str], dict[str, list[Figures]]]:
    """Commands and figures by source of drafts, of which each is simulated for at most so many tokens."""
    commands, figures = [], {}
    for name, tokens in sources.items():
        command, figures[name] = simulated(clusters, strategies, [*more, *source(name, tokens)])
        commands.append(command)
    return commands, figures


# ------------------------------------------------------------------------------------------------------------ figure 4


def take_tree() -> Taken:
    sweep = ["--sweep", "width=8..128,children=2..16"]
    commands, figures = simulations([CLUSTER], ["pipedec"], {"T0": 1500, "profile": 1000}, sweep)
    return commands, {name: [run for run in runs if run["settings"]] for name, runs in figures.items()}


def tree_cell(run: Figures, runs: Sequence[Figures]) -> str:
    """Milliseconds per token, in bold where they are the fewest, and accuracy."""
    best = min(runs, key=lambda other: other["ms_per_token"])
    return f"{f'**{ms(run)}**' if run is best else ms(run)}, {percent(run['hit_rate'])}"


# ------------------------------------------------------------------------------------------------------ figures 5 and 6


def take_stages() -> Taken:
    strategies = [PLAIN, STATIC, f"{STATIC}[tree_size=48]", "pipedec", "auto"]
    return simulations(CLUSTERS, strategies, {"T0": 10_000, "profile": 4000})


def stages_values(figures: Any) -> Mapping[str, Any]:
    """Ours beside the paper's figures, by source of drafts."""
    columns = [ours_over(runs) for runs in figures.values()]
    ours = {name: [column[name] for column in columns] for name in columns[0]}
    return {"ours": ours, "small_ms": 1e3 * small_model_seconds(), "drafters": DRAFTERS, "ms": ms, "percent": percent}


def ours_over(runs: Sequence[Figures]) -> dict[str, str]:
    seven, fourteen, more = ({run["strategy"]: run for run in runs if run["cluster"] == name} for name in CLUSTERS)
    plain, pipedec, auto = fourteen[PLAIN], fourteen["pipedec"], fourteen["auto"]
    static = min(
        (run for name, run in fourteen.items() if name.startswith(STATIC)), key=lambda run: run["ms_per_token"]
    )
    return {
        "over_plain": said(over(pipedec, plain)),
        "over_static": said(over(pipedec, static)),
        "over_seven": said(over(pipedec, seven["pipedec"])),
        "with_more": said(over(more["pipedec"], pipedec)),
        "small": times(pipedec["ms_per_token"] / (1e3 * small_model_seconds())),
        "auto": said(over(auto, plain)),
        "auto_over_pipedec": said(over(auto, pipedec)),
        "static": times(over(static, plain).mean),
    }


def small_model_seconds() -> float:
    """Seconds per token of Llama-3.1-8B alone on the drafter's device."""
    timing = draft_timing(replace(load_cluster(CLUSTER), draft_as_model=SMALL_8B))
    assert timing is not None
    return timing.seconds(1)


# ------------------------------------------------------------------------------------------- figure 7 and the demo pair


def take_demo_pair() -> Taken:
    return simulations([CLUSTER], DEMO_PAIR, dict.fromkeys(SAMPLINGS, 10_000))


def demo_pair_values(figures: Any) -> Mapping[str, Any]:
    def over_best(runs: Sequence[Figures]) -> str:
        best = min((find(runs, name) for name in WIDE), key=lambda run: sum(run["seconds"]))
        return said(over(find(runs, "auto"), best))

    def sampled(name: str) -> str:
        """The cost of sampling in words."""
        greedy, warm = (find(figures[part], name) for part in ("T0", "T0.6"))
        slower = warm["ms_per_token"] / greedy["ms_per_token"] - 1
        return (
            f"takes {abs(slower):.0%} {'more' if slower > 0 else 'less'} time per token when sampling so, with "
            f"accuracy {percent(warm['hit_rate'])} instead of {percent(greedy['hit_rate'])}"
        )

    return {
        "labels": LABELS,
        "strategies": DEMO_PAIR[1:],
        "find": find,
        "percent": percent,
        "over_best": over_best,
        "sampled": sampled,
    }


def seeds_values(figures: Any) -> Mapping[str, Any]:
    found = figures[pipedec_seeds.CLUSTER]
    ways = [found[strategy] for strategy in pipedec_seeds.STRATEGIES]

    def row(strategy: str, way: Mapping[str, Any]) -> list[str]:
        in_both = pipedec_seeds.costs(way)
        cells = [
            f"{fmean(fmean(one['ms'][prompt]) for prompt in in_both):.1f}, {percent(one['accuracy'])}"
            for one in (way[name] for name in pipedec_seeds.TEMPERATURES)
        ]
        return [f"`{strategy}`", *cells, said(pipedec_seeds.sampled_over_greedy(way))]

    return {
        "found": found,
        "rows": list(map(row, pipedec_seeds.STRATEGIES, ways)),
        "looping": [ways[0][name]["looping"] for name in pipedec_seeds.TEMPERATURES],
        "beside": said(pipedec_seeds.beside_static(found)),
        "same": all(one["identical"] for way in ways for one in way.values()),
    }


# ------------------------------------------------------------------------------------------ figure 8 and tensor groups


def throughput_values(figures: Any) -> Mapping[str, Any]:
    cells = {(row["strategy"], row["how"], row["at_once"]): row for row in figures["rows"]}
    fewest, most = (sum(bound) for bound in zip(pipedec_throughput.PROMPT, pipedec_throughput.ANSWER, strict=True))

    def rate(*wanted: Any) -> str:
        row = cells[wanted]
        over = row["over_pipedec"]
        ratio = f" ({over['mean']:.2f}x, {over['low']:.2f} to {over['high']:.2f})" if over else ""
        return f"{row['tokens_per_second']:.1f}{ratio}"

    return {"fewest": fewest, "most": most, "rate": rate}


def groups_values(figures: Any) -> Mapping[str, Any]:
    """How many times as long others take as tensor parallel groups, by cluster, strategy and drafts."""
    ms_of = {(one["cluster"], one["profile"]): one["ms"] for one in figures["decoding"]}

    def ratio(other: str, name: str, profile: str = "profile") -> str:
        return f"{ms_of[other, profile][name] / ms_of[tensor_groups.TENSORS, profile][name]:.2f}"

    weak = "a weak drafter, right in 40, 50, 55 and 58% of the steps"
    return {"profiles": {"profile": "the synthetic profile", "weak": weak}, "ratio": ratio}


# --------------------------------------------------------------------------------------------------------- in processes


def take_emulated() -> Taken:
    prompts, scale = 20, 2.0
    pipedec = pipedec_setting.measured(prompts, scale)
    accuracy = ", ".join(map(str, ACCURACY))
    drafting = f'{{"method": "synthetic", "tree_size": 48, "accuracy": [{accuracy}]}}'
    texts = ["--num-prompts", "6", "--max-tokens", "100", "--temperature", "1", "--speculative-config", drafting]
    bench = ["bench", "--model", "demo", "--cluster", CLUSTER, "--strategies", f"{PLAIN},{STATIC}"]
    command, content = with_json_file([*bench, *texts])
    static = next(run for run in content["runs"] if run["strategy"] == STATIC)
    figures = {
        "pipedec": pipedec,
        "static_tree": {"tokens": static["tokens"], "speedup": static["wall_clock_speedup"], "time_scale": 1.0},
        "bound": bound(),
    }
    bounds = "python -m benchmarks.papers.pipedec_bound"
    return [f"python -m benchmarks.papers.pipedec_setting {prompts} {scale:g}", command, bounds], figures


def bound() -> dict[str, float]:
    """Speed-ups that PipeDec's tree reaches in ideal lockstep at width 32, by kind of confidence."""
    cluster = load_cluster(CLUSTER)
    stages = stage_timings(cluster)
    stage = max(timing.seconds(32) for timing in stages)
    found = {}
    for kind, varying in (("constant", False), ("varying", True)):
        steps = np.mean([pipedec_bound.steps_per_token(len(stages), 32, varying, seed) for seed in range(3)])
        found[kind] = float(plain_step_seconds(cluster) / (steps * stage))
    return found


def take_processes() -> Taken:
    texts = ["--num-prompts", "2", "--max-tokens", "48", *SAMPLING["T0.6"], "--time-scale", "3"]
    command, content = with_json_file(
        ["bench", "--model", "demo", "--cluster", CLUSTER, "--strategies", f"{PLAIN},pipedec,{STATIC},auto", *texts]
    )
    names = ("strategy", "wall_clock_speedup", "mean_acceptance_length", "overrun_fraction")
    figures = [
        {
            **{name: run[name] for name in names},
            "stages_busy": sum(run["stage_busy"]) / len(run["stage_busy"]),
            "identical": run["identical_to_autoregressive"],
        }
        for run in content["runs"]
    ]
    return [command], figures


SECTIONS = {
    "pipedec_tree": Section(
        how="Simulated, from a recording of the demo pair and with the synthetic profile",
        take=take_tree,
        values=lambda figures: {"drafters": DRAFTERS, "tree_cell": tree_cell},
    ),
    "pipedec_stages": Section(
        how="Simulated, from a recording of the demo pair and with the synthetic profile",
        take=take_stages,
        values=stages_values,
    ),
    "pipedec_demo_pair": Section(
        how="Simulated, from recordings of the demo pair", take=take_demo_pair, values=demo_pair_values
    ),
    "pipedec_seeds": Section(values=seeds_values),
    "pipedec_throughput": Section(values=throughput_values),
    "tensor_groups": replace(by_script(tensor_groups), values=groups_values),
    "pipedec_emulated": Section(how="Emulated, with the synthetic profile", take=take_emulated),
    "pipedec_processes": Section(how="Emulated, with the demo pair", take=take_processes),
}
