"""PipeDec's setting in stage processes, each held back until its modelled device would have been done."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.papers import pipedec_bound, pipedec_setting
from benchmarks.sections.base import Section, paragraphs
from benchmarks.sections.pipedec import CLUSTER, PLAIN, STATIC
from benchmarks.shared.commands import with_json_file
from benchmarks.shared.measured import Taken
from benchmarks.shared.simulations import SAMPLING
from penstock.cluster import load_cluster, plain_step_seconds, stage_timings
from penstock.lab.common import markdown


def take_emulated() -> Taken:
    prompts, scale = 20, 2.0
    pipedec = pipedec_setting.measured(prompts, scale)
    accuracy = ", ".join(map(str, pipedec_setting.ACCURACY))
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


def render_emulated(figures: Any) -> str:
    pipedec, static, ideal = figures["pipedec"], figures["static_tree"], figures["bound"]
    rows = [
        ["`pipedec`", f"{pipedec['tokens']:,}", f"{pipedec['time_scale']:g}", ranged(pipedec)],
        ["`static_tree`, 48 nodes", f"{static['tokens']:,}", f"{static['time_scale']:g}", f"{static['speedup']:.2f}x"],
    ]
    return paragraphs(
        "Stage processes, each held back until its modelled device would have been done; T = 1, width 32, 16 "
        "children. All outputs identical to plain decoding.",
        markdown(["strategy", "tokens", "time scale", "over the plain pipeline"], rows),
        "The figure hangs on how many misses the draw holds, since one costs a whole trip of 0.39 s, and on a "
        "quiet host. In ideal lockstep, without links, drafting time or overhead, PipeDec's tree reaches "
        f"{ideal['constant']:.2f}x if the drafter is equally sure everywhere and {ideal['varying']:.2f}x if its "
        "confidence varies as the demo pair's does, which is what the synthetic drafter does. Both are of ours, which "
        "grows on from candidates that were cut before, where PipeDec waits for a miss: "
        "`python -m benchmarks.papers.pipedec_departures` finds that to be worth about 1%. Simulated over more tokens "
        "the figure is [above](#pipedec-fig-5-and-6-7-14-and-21-stages).",
    )


def ranged(found: Any) -> str:
    return f"**{found['speedup']:.2f}x** (95%: {found['low']:.2f} to {found['high']:.2f})"


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


def render_processes(figures: Any) -> str:
    rows = [
        [
            f"`{run['strategy']}`",
            f"{run['wall_clock_speedup']:.2f}x",
            f"{run['mean_acceptance_length']:.2f}",
            f"{run['stages_busy']:.0%}",
            f"{run['overrun_fraction']:.1%}",
            "yes" if run["identical"] else "NO",
        ]
        for run in figures
    ]
    headings = ["strategy", "speed-up", "tokens per tree", "stages busy", "overruns", "identical"]
    remark = (
        "Two short prompts at time scale 3: a first look, not a study. The pair agrees better than the models of the "
        "paper may (its draft has the target's token among its best four candidates in 93% of held-out positions)."
    )
    return paragraphs(markdown(headings, rows), remark)


SECTIONS = (
    Section(
        name="pipedec_emulated",
        title="PipeDec's setting in processes, synthetic drafter",
        how="Emulated, with the synthetic profile",
        take=take_emulated,
        render=render_emulated,
    ),
    Section(
        name="pipedec_processes",
        title="PipeDec's setting in processes, demo pair",
        how="Emulated, with the demo pair",
        take=take_processes,
        render=render_processes,
    ),
)
