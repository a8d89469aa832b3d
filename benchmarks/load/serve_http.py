"""Serving over HTTP, in wall-clock time: `penstock serve` on emulated clusters, `penstock bench serve` as its users.

    python -m benchmarks.load.serve_http [--rounds 3] [--prompts 16] [--tokens 48] [--time-scale 1] [BOARDS ...]

BOARDS are numbers of the preset demo's edge boards: 4 and 14 by default. Every strategy has a server of its own, all of
them are up at once, and in every round each takes its turn at each concurrency, another one first: idle servers send
heartbeats and no more. The demo pair talks; prefix caching is off, so that repeated prompts cost what new ones do.
Ratios over plain continuous batching are paired by round, with the 95% bounds of `penstock bench`. Overruns are the
stages' passes whose real computation took longer than the modelled device would have: above 5% the figures are not
valid, and a larger --time-scale, which stretches all modelled times, is the remedy.

Each cluster is written to benchmarks/measured/load/serve_http.json as it finishes.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.paired import bounded
from benchmarks.shared.served import PENSTOCK, ServedProcess, served
from penstock.cluster import load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.config import check
from penstock.core import ConfigError
from penstock.lab.grid import DEFAULT_PROMPTS
from penstock.lab.plan_choices import cluster_toml

NAME, HOW = "serve_http", "Emulated, over HTTP, with the demo pair"
PLAIN = "autoregressive"
STRATEGIES = (PLAIN, "static_tree", "pipedec", "auto")
CONCURRENCY = (1, 2, 4, 8, 16, 32)
BOARDS = (4, 14)
WARM = 4
"""Requests to each server before the first round, from which `auto` learns."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    rounds: int
    prompts: int
    tokens: int
    time_scale: float

    def __post_init__(self) -> None:
        check(self.rounds >= 2, "rounds", self.rounds, "at least 2: bounds need pairs")


def given(found: Mapping[str, Any]) -> str:
    """The arguments that measure these figures again."""
    flags = [f"--{name.replace('_', '-')} {found[name]:g}" for name in Sizes.__dataclass_fields__]
    return f"{' '.join(flags)} {found['boards']}"


# ------------------------------------------------------------------------------------------------------------ measuring


def compared(boards: int, sizes: Sizes) -> dict[str, Any]:
    """Throughput and latencies by concurrency and strategy, and ratios over plain continuous batching."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = replace(uniform_cluster(load_cluster("demo"), boards), time_scale=sizes.time_scale)
        (folder / "cluster.toml").write_text(cluster_toml(cluster))
        flags = ("demo", "--cluster", str(folder / "cluster.toml"), "--no-web", "--no-enable-prefix-caching")
        servers = {name: stack.enter_context(served(*flags, "--strategy", name)) for name in STRATEGIES}
        for server in servers.values():
            load(server, folder, WARM, sizes.tokens, seed=10**6, count=WARM)
        runs = list(rounds(servers, folder, sizes))
        overruns = {name: overrun_share(server) for name, server in servers.items()}
    texts = {(concurrency, number, *run["texts"]) for concurrency, number, _, run in runs}
    return {
        "boards": boards,
        **asdict(sizes),
        "overruns": overruns,
        "identical": len(texts) == len(CONCURRENCY) * sizes.rounds,
        "concurrency": {
            str(concurrency): [summary(name, concurrency, runs) for name in STRATEGIES] for concurrency in CONCURRENCY
        },
    }


Run = tuple[int, int, str, dict[str, Any]]
"""Concurrency, round, strategy and figures."""


def rounds(servers: Mapping[str, ServedProcess], folder: Path, sizes: Sizes) -> Iterator[Run]:
    names = list(servers)
    for number in range(sizes.rounds):
        for concurrency in CONCURRENCY:
            for name in names:
                count = max(sizes.prompts, concurrency)
                run = load(servers[name], folder, concurrency, sizes.tokens, 1000 * number, count)
                print(
                    f"round {number + 1}, {concurrency:2} at a time, {name:15} {run['throughput']:7.2f} tokens/s",
                    flush=True,
                )
                yield concurrency, number, name, run
        names = names[1:] + names[:1]


def load(server: ServedProcess, folder: Path, concurrency: int, tokens: int, seed: int, count: int) -> dict[str, Any]:
    """One level of ``penstock bench serve``. Requests are sampled, each with a seed of its own."""
    file = folder / "load.json"
    arguments = ["bench", "serve", "--url", f"{server.url}/v1", "--dataset", str(DEFAULT_PROMPTS), "--ignore-eos"]
    arguments += ["--concurrency", str(concurrency), "--num-prompts", str(count), "--num-warmups", "0"]
    arguments += ["--output-len", str(tokens), "--temperature", "1", "--seed", str(seed), "--json", str(file)]
    done = subprocess.run([PENSTOCK, *arguments], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(done.stderr)
    (run,) = json.loads(file.read_text(encoding="utf-8"))["runs"]
    if run["failed"]:
        raise ConfigError(f"{run['failed']} requests failed: {run['errors']}")
    return {
        "throughput": run["output_throughput"],
        "latency": [request["e2el"] for request in run["requests"]],
        "ttft": [request["ttft"] for request in run["requests"]],
        "texts": [request["text_sha256"] for request in run["requests"]],
    }


def overrun_share(server: ServedProcess) -> float:
    gauges = server.gauges()
    modelled = gauges["penstock:emulated_passes_total"]
    return gauges["penstock:emulated_overruns_total"] / modelled if modelled else 0.0


def summary(name: str, concurrency: int, runs: Sequence[Run]) -> dict[str, Any]:
    own, plain = ([run for k, _, n, run in runs if (k, n) == (concurrency, one)] for one in (name, PLAIN))
    latencies = {what: [value for run in own for value in run[what]] for what in ("latency", "ttft")}
    return {
        "strategy": name,
        "throughput": float(np.mean([run["throughput"] for run in own])),
        "over_plain": bounded(*([one["throughput"] for one in some] for some in (own, plain))),
        **{f"{what}_p{q}": float(np.percentile(values, q)) for what, values in latencies.items() for q in (50, 99)},
    }


def main(benchmark: Benchmark, boards: Sequence[int], **sizes: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for count in boards:
        found = compared(count, Sizes(**sizes))
        show(found["concurrency"], f"{count} boards")
        show({name: found[name] for name in ("overruns", "identical")})
        figures = {**kept_figures(NAME), str(count): found}
        benchmark.keep(figures, commands=[benchmark.command(given(one)) for one in figures.values()])


if __name__ == "__main__":
    benchmark, boards = Benchmark(__file__, HOW), {"type": int, "nargs": "*"}
    options = benchmark.parser(rounds=3, prompts=16, tokens=48, time_scale=1.0, boards=boards).parse_args()
    with benchmark.refusing():
        main(benchmark, **{**vars(options), "boards": options.boards or BOARDS})
