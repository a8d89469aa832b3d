"""Thousands of short requests on one server, with clients that leave, dawdle and send nonsense, and what remains of
them.

    python -m benchmarks.load.soak [REQUESTS] [RATE]

`penstock serve demo -pp 2` runs with a draft model, few KV slots, a short queue and the prefix cache, at RATE requests
per second (10,000 at 12 by default): whole and streamed answers, structured outputs, penalties, several choices, chats;
slow readers, clients that leave before, during and after the answer or within their own body, and all kinds of bad
requests. Every answer is compared, token ids and text, with the request's answer alone in a plain engine of one stage.
After the first tenth, which is the warm-up, and at the end the server is left idle, and its resources are compared:
requests, slots, memory, processes, threads, descriptors. At last it is told to stop.

The results are written to benchmarks/measured/load/soak.json. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.load.soaking.cases import drawn_cases
from benchmarks.load.soaking.clients import KEY
from benchmarks.load.soaking.resources import PROCESSES, slopes
from benchmarks.load.soaking.run import FLAGS, Soak, Soaked
from benchmarks.shared.benchmark import show
from benchmarks.shared.measured import store
from benchmarks.shared.served import served
from penstock.config import check
from penstock.core import ConfigError

NAME, HOW = "soak", "Measured, with the demo pair"
REQUESTS, RATE = 10_000, 12.0
CASES = 300
POINTS = 40
"""Number of points of the memory's course that are stored."""
COUNTERS = (
    *("prompt_tokens", "prefix_cache_hits", "generation_tokens", "num_preemptions"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "rows_entered", "rows_cancelled"),
)


def figures_of(found: Soaked, requests: int, rate: float) -> dict[str, Any]:
    assert found.warm is not None
    assert found.end is not None
    step = max(1, len(found.samples) // POINTS)
    return {
        "requests": requests,
        "rate": rate,
        "cases": CASES,
        "seconds": found.seconds,
        "kinds": found.kinds,
        "problems": found.problems,
        "counters": {name: found.counters[f"penstock:{name}_total"] for name in COUNTERS},
        "drain_seconds": found.drain_seconds,
        "processes": PROCESSES,
        "warm": vars(found.warm),
        "end": vars(found.end),
        "kib_per_1000_requests": slopes(found.samples[len(found.samples) // 2 :]),
        "resident_mib": [[one.requests, *one.resident] for one in found.samples[::step]],
    }


def main(requests: int, rate: float) -> int:
    check(requests >= 100, "REQUESTS", requests, "at least 100")
    check(rate > 0, "RATE", rate, "above 0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = drawn_cases(CASES, seed=0)
    with served(*FLAGS, api_key=KEY) as server:
        found = Soak(server, cases, requests, rate, warm=requests // 10).run()
    figures = figures_of(found, requests, rate)
    show(figures)
    store(NAME, HOW, ([f"python -m benchmarks.load.soak {requests} {rate:g}"], figures))
    return 1 if found.problems else 0


if __name__ == "__main__":
    try:
        sys.exit(
            main(*(kind(text) for kind, text in zip((int, float), sys.argv[1:] or (REQUESTS, RATE), strict=False)))
        )
    except ConfigError as error:
        sys.exit(f"{NAME}: error: {error}")
