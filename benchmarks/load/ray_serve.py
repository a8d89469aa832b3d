"""Ray Serve: replicas are killed, rolled and started from none under load, and streams are counted and compared.

    python -m benchmarks.load.ray_serve [--moved 100] [--rolls 3] [--starts 5]

Replicas of the demo model run behind the ingress of `penstock.ray_serve` on one node. Streams with the fields of the
HTTP API are read side by side while a replica's actor is killed, again and again, until so many have gone on on another
replica; then while all replicas are replaced by ones with other settings. Every stream is compared with the answer of
one server. At last, so many times, the application waits until no replica is left, and requests come: the seconds until
the first token, and until two replicas are up.

The figures are written to benchmarks/measured/load/ray_serve.json. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark, show
from tests.integration.server.test_ray_serve import (
    BEGUN,
    SETTINGS,
    Answers,
    Asked,
    Cluster,
    answers,
    cluster,
    tokens_of,
)
from tests.integration.server.test_resume import CASES
from tests.integration.server.test_serve import TEMPLATE
from tests.processes import free_port
from tests.serving import served, until

BENCHMARK: Final = Benchmark(__file__, "Measured, with the demo pair, on one host")
REPLICAS: Final = 2
SEEDS: Final = 3
"""Streams of each case that are read side by side."""
BEGIN_S: Final = 300.0
"""Seconds within which streams have to begin."""


class Compared:
    """Counts streams, and those that differ from the answers of one server. A stream that is cut raises."""

    def __init__(self, expected: Answers) -> None:
        self.expected = expected
        self.streams = 0
        self.different: list[str] = []
        self.cut: list[str] = []

    def read(self, url: str, begun: threading.Semaphore | None = None) -> None:
        """Ask for all answers at once."""
        try:
            found = answers(url, list(self.expected), begun)
        except Exception as error:  # whatever a client met: a stream has not come to its end
            self.cut.append(f"{type(error).__name__}: {error}")
            return
        self.streams += len(found)
        want, got = tokens_of(self.expected), tokens_of(found)
        self.different += [f"{asked}" for asked in want if want[asked] != got[asked]]


def while_reading(compared: Compared, url: str, happens: Callable[[], None]) -> None:
    """Let something happen once ``BEGUN`` streams have begun, and read all to their ends."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(compared.read, url, begun)
        for _ in range(BEGUN):
            begun.acquire(timeout=BEGIN_S)
        happens()
        reading.result()


def killed(found: Cluster, compared: Compared, moved: int) -> int:
    """Kill a replica amid answers until ``moved`` streams have gone on elsewhere. Returns the number of kills."""
    kills, before = 0, found.moves()
    while found.moves() - before < moved and not compared.cut:
        until(lambda: len(found.replicas()) == REPLICAS)
        while_reading(compared, found.url, found.replicas()[kills % REPLICAS].kill)
        kills += 1
    return kills


def rolled(found: Cluster, compared: Compared, rolls: int) -> None:
    """Replace all replicas, again and again, while streams are read."""
    for number in range(rolls):
        with ThreadPoolExecutor(1) as roller:
            rolling = roller.submit(found.run, **SETTINGS, min_replicas=REPLICAS, max_num_seqs=8 + number)
            while not rolling.done():
                compared.read(found.url)
            rolling.result()


def started(found: Cluster, compared: Compared, starts: int) -> list[dict[str, float]]:
    """Seconds from a request to its first token, and until all replicas are up, from none."""
    found.run(**SETTINGS, min_replicas=0, max_replicas=REPLICAS, upscale_delay=0, downscale_delay=1)
    times = []
    for _ in range(starts):
        until(lambda: not found.replicas())
        begun, asked_at = threading.Semaphore(0), time.monotonic()
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(compared.read, found.url, begun)
            begun.acquire(timeout=BEGIN_S)
            first_s = time.monotonic() - asked_at
            until(lambda: len(found.replicas()) == REPLICAS)
            all_s = time.monotonic() - asked_at
            reading.result()
        times.append({"first_token_s": round(first_s, 2), "all_s": round(all_s, 2)})
    return times


def measured(moved: int, rolls: int, starts: int) -> dict[str, Any]:
    asked: list[Asked] = [(name, seed) for seed in range(SEEDS) for name in CASES]
    with served("demo", "--strategy", "autoregressive", "--chat-template", str(TEMPLATE)) as alone:
        expected = answers(alone.url, asked)
    by_kill, by_roll, from_none = Compared(expected), Compared(expected), Compared(expected)
    with cluster(free_port()) as found:
        found.run(**SETTINGS, min_replicas=REPLICAS)
        kills = killed(found, by_kill, moved)
        moves = found.moves()
        rolled(found, by_roll, rolls)
        times = started(found, from_none, starts)
    compared = {"kills": by_kill, "rolls": by_roll, "starts": from_none}
    return {
        "kills": kills,
        "moved": moves,
        "rolls": rolls,
        "starts": times,
        "first_token_s": statistics.median(one["first_token_s"] for one in times),
        "streams": {name: one.streams for name, one in compared.items()},
        "different": [problem for one in compared.values() for problem in one.different],
        "cut": [problem for one in compared.values() for problem in one.cut],
    }


def main(moved: int, rolls: int, starts: int) -> int:
    figures = measured(moved, rolls, starts)
    BENCHMARK.keep(figures, f"--moved {moved} --rolls {rolls} --starts {starts}")
    show(figures)
    return 1 if figures["different"] or figures["cut"] else 0


if __name__ == "__main__":
    options = BENCHMARK.parser(moved=100, rolls=3, starts=5).parse_args()
    sys.exit(main(options.moved, options.rolls, options.starts))
