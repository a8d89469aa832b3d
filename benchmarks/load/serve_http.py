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

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.measured import kept_figures, store
from benchmarks.shared.served import PENSTOCK, ServedProcess, served
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.cluster.timing import MAX_OVERRUNS
from penstock.config import check
from penstock.core import ConfigError
from penstock.lab.common import paired_ratio
from penstock.lab.grid import DEFAULT_PROMPTS

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


def command_of(found: Mapping[str, Any]) -> str:
    """The command that measures these figures again."""
    flags = [f"--{name.replace('_', '-')} {found[name]:g}" for name in Sizes.__dataclass_fields__]
    return f"python -m benchmarks.load.{NAME} {' '.join(flags)} {found['boards']}"


# ------------------------------------------------------------------------------------------------------ cluster files


def write_cluster(cluster: Cluster, file: Path) -> None:
    """Write a cluster file. Every device has its own numbers in it."""
    table = asdict(replace(cluster, devices=tuple(replace(device, kind=None) for device in cluster.devices)))
    table["links"] = {name: link for name, link in table["links"].items() if link}
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in table.items() if value is not None))


def toml(value: Any) -> str:
    """A value on one line; None entries are left out."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml(one)}" for key, one in value.items() if one is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


# ------------------------------------------------------------------------------------------------------------ measuring


def compared(boards: int, sizes: Sizes) -> dict[str, Any]:
    """Throughput and latencies by concurrency and strategy, and ratios over plain continuous batching."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = replace(uniform_cluster(load_cluster("demo"), boards), time_scale=sizes.time_scale)
        write_cluster(cluster, folder / "cluster.toml")
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
    ratio = paired_ratio([one["throughput"] / base["throughput"] for one, base in zip(own, plain, strict=True)])
    assert ratio is not None
    latencies = {what: [value for run in own for value in run[what]] for what in ("latency", "ttft")}
    return {
        "strategy": name,
        "throughput": float(np.mean([run["throughput"] for run in own])),
        "over_plain": [ratio.mean, ratio.low, ratio.high],
        **{f"{what}_p{q}": float(np.percentile(values, q)) for what, values in latencies.items() for q in (50, 99)},
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    for concurrency, rows in found["concurrency"].items():
        for row in rows:
            mean, low, high = row["over_plain"]
            late = found["overruns"][row["strategy"]]
            yield (
                f"{found['boards']:3} boards {concurrency:>3} {row['strategy']:15} {row['throughput']:8.2f} tokens/s  "
                f"{mean:5.2f}x ({low:.2f} to {high:.2f})  latency {row['latency_p50']:.2f} / {row['latency_p99']:.2f} s"
                + (f"  NOT VALID: {late:.0%} overruns" if late > MAX_OVERRUNS else "")
            )
    if not found["identical"]:
        yield "NOT IDENTICAL: some texts differ between strategies"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Serving over HTTP on emulated clusters.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("boards", type=int, nargs="*", default=BOARDS)
    options = vars(parser.parse_args(arguments))
    boards = options.pop("boards")
    sizes = Sizes(**options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for count in boards:
        found = compared(count, sizes)
        print(*lines(found), sep="\n", flush=True)
        figures = {**kept_figures(NAME), str(count): found}
        store(NAME, HOW, ([command_of(one) for one in figures.values()], figures))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"{NAME}: error: {error}")
