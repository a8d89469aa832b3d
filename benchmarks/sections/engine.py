"""The engine itself: exactness, overhead, links, the demo, simulator and emulator, processes without emulation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.costs import decisions, links, lookup, overhead, two_processes
from benchmarks.sections.base import Section, by_script
from benchmarks.shared import virtual
from benchmarks.shared.commands import command_line, penstock, with_json_file, with_json_output
from benchmarks.shared.measured import Taken
from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import RECORDINGS, find, simulated
from penstock.cluster import load_cluster

SIMULATE = ["simulate", "--cluster", "pipedec-14x3090", "--tokens", "10000"]


def take_decisions() -> Taken:
    runs = decisions.measured()
    started = time.perf_counter()
    penstock(SIMULATE)
    seconds = time.perf_counter() - started
    commands = ["python -m benchmarks.costs.decisions", command_line(SIMULATE)]
    return commands, {"runs": runs, "simulate_seconds": seconds}


def take_demo() -> Taken:
    command, content = with_json_output(["demo", "--embedded"])
    fast = content["runs"][1]
    names = ("strategy", "overrun_fraction")
    return [command], {
        **{name: fast[name] for name in names},
        **{name: content[name] for name in ("speedup", "identical")},
    }


# --------------------------------------------------------------------------------------------------------------- links

LINKS = {
    "ipc": "ours, Unix-domain socket",
    "tcp": "ours, tcp",
    "tls": "ours, TLS 1.3",
    "zeromq": "ZeroMQ",
    "curve": "ZeroMQ, CURVE",
}


def take_links() -> Taken:
    return ["pip install pyzmq", "python -m benchmarks.costs.links"], links.measured()


def links_values(figures: Any) -> Mapping[str, Any]:
    """Headings by size, and the rows of each place by kind of link."""
    sizes = sorted({row["size"] for row in figures})
    cells = {(row["place"], row["kind"], row["size"]): row for row in figures}

    def rows(place: str) -> list[list[str]]:
        measured = [kind for kind in LINKS if (place, kind, 0) in cells]
        return [[LINKS[kind], *(link_cell(cells[place, kind, size]) for size in sizes)] for kind in measured]

    return {"sizes": [*map(size_words, sizes)], **{place: rows(place) for place in ("loopback", "namespaces")}}


def link_cell(row: Mapping[str, Any]) -> str:
    alone = f"{row['ms']:.3f}"
    return alone if row["size"] == 0 else f"{alone} ({row['mb_s']:.0f})"


def size_words(size: int) -> str:
    if size == 0:
        return "header alone"
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


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


def simulator_values(figures: Any) -> Mapping[str, Any]:
    """The runs, with the time with real drafts and the simulator's estimate of the overhead, and how they agree."""
    runs = [{**run, "drafted_ms": run["virtual_ms"] + run["with_hops_ms"] - run["simulated_ms"]} for run in figures]

    def farthest(modelled_ms: str, learns: bool) -> str:
        """Greatest relative difference between emulation and model, where the emulation is valid."""
        some = [run for run in runs if run["valid"] and (run["strategy"] == "auto") is learns]
        return f"{max(abs(run['emulated_ms'] / run[modelled_ms] - 1) for run in some):.1%}"

    return {"runs": runs, "farthest": farthest}


def centralised_values(figures: Any) -> Mapping[str, Any]:
    return {"same": all(one["identical"] for found in figures.values() for one in found["entries"].values())}


SECTIONS = {
    "overhead": by_script(overhead),
    "decisions": Section(how="Measured, without a model", take=take_decisions),
    "lookup": by_script(lookup),
    "links": Section(how="Measured, without a model", take=take_links, values=links_values),
    "simulator": Section(
        how="Emulated and simulated, with the demo pair", take=take_simulator, values=simulator_values
    ),
    "demo": Section(how="Emulated, with the demo pair", take=take_demo),
    "two_processes": by_script(two_processes),
    "centralised": Section(values=centralised_values),
}
