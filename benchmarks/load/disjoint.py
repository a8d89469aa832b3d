"""Throughput of several engines behind one server, each on devices of its own, and what the server costs.

    python -m benchmarks.load.disjoint [--rounds 5] [--boards 2] [--time-scale 1] [ENGINES ...]

A server of each number of ENGINES (1, 2 and 4 by default) runs the demo pair's target, each engine on so many emulated
edge boards, which compute as long as the modelled boards would, whatever else this host computes. Every server gets the
same number of requests per engine at the same time, in turn. Ratios are over as many times the throughput of one
engine, paired by round. The server's process holds the front end and the engines' own threads: its processor time is
divided by the tokens of all answers. Overruns are as in `benchmarks.load.serve_http`.

The figures are written to benchmarks/measured/load/disjoint.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.load.serve_http import load, overrun_share
from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import bounded
from benchmarks.shared.served import ServedProcess, served
from penstock.cluster import load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.lab.plan_choices import cluster_toml

BENCHMARK: Final = Benchmark(__file__, "Emulated, over HTTP, with the demo pair's target")
ENGINES: Final = (1, 2, 4)
AT_ONCE: Final = 8
"""Requests of each engine at a time."""
REQUESTS: Final = 16
"""Requests of each engine in a round."""
TOKENS: Final = 48


def processor_s(server: ServedProcess) -> float:
    """Seconds of processor time that the server's own process has taken, without its stages."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def measured(engines: Sequence[int], rounds: int, boards: int, time_scale: float) -> dict[str, Any]:
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in engines}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = replace(uniform_cluster(load_cluster("demo"), boards), time_scale=time_scale)
        (folder / "cluster.toml").write_text(cluster_toml(cluster))
        flags = ("demo", "--cluster", str(folder / "cluster.toml"), "--no-web", "--strategy", "autoregressive")
        servers = {count: stack.enter_context(served(*flags, "--data-parallel-size", str(count))) for count in engines}
        for number in range(rounds):
            for count, server in servers.items():
                before = processor_s(server)
                requests = REQUESTS * count
                run = load(server, folder, AT_ONCE * count, TOKENS, 1000 * number, requests)
                used = processor_s(server) - before
                runs[count].append({"throughput": run["throughput"], "ms_per_token": 1e3 * used / (requests * TOKENS)})
        overruns = {count: overrun_share(server) for count, server in servers.items()}
    alone = [one["throughput"] for one in runs[engines[0]]]
    return {
        "boards": boards,
        "time_scale": time_scale,
        "engines": {
            str(count): {
                "throughput": statistics.median(one["throughput"] for one in some),
                "of_as_many": bounded([one["throughput"] * engines[0] / count for one in some], alone),
                "ms_per_token": statistics.median(one["ms_per_token"] for one in some),
                "overruns": overruns[count],
            }
            for count, some in runs.items()
        },
    }


def main(engines: Sequence[int], rounds: int, boards: int, time_scale: float) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = measured(engines, rounds, boards, time_scale)
    given = f"--rounds {rounds} --boards {boards} --time-scale {time_scale:g} {' '.join(map(str, engines))}"
    BENCHMARK.keep(figures, given)
    show(figures["engines"])


if __name__ == "__main__":
    arguments = {"engines": {"type": int, "nargs": "*"}}
    options = BENCHMARK.parser(rounds=5, boards=2, time_scale=1.0, **arguments).parse_args()
    with BENCHMARK.refusing():
        main(options.engines or ENGINES, options.rounds, options.boards, options.time_scale)
