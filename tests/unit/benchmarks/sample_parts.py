"""A benchmark whose parts end in every way: ``python -m tests.unit.benchmarks.sample_parts``, run by the tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.shared.timed_parts import DoesNotFit, Findings, Part, parts_parser, run

MODULE = "tests.unit.benchmarks.sample_parts"
LONG = "import sys, threading; threading.Event().wait()"
"""A program that never ends by itself."""


def good(options: argparse.Namespace, findings: Findings) -> None:
    findings.add("answer", 42)
    with findings.trying("odd"):
        raise ValueError("an odd number")
    with findings.trying("large"):
        raise DoesNotFit("larger than what is there")
    findings.add("environment", os.environ["PENSTOCK_FORGET"])


def wrong(options: argparse.Namespace, findings: Findings) -> None:
    findings.add("before", 1)
    raise RuntimeError("all is lost")


def crashing(options: argparse.Namespace, findings: Findings) -> None:
    findings.add("before", 1)
    print("last words", flush=True)
    os.abort()


def endless(options: argparse.Namespace, findings: Findings) -> None:
    """Never ends, nor does a process that it has started."""
    started = subprocess.Popen([sys.executable, "-c", LONG])
    findings.add("started", started.pid)
    threading.Event().wait()


def crowded(options: argparse.Namespace, findings: Findings) -> None:
    findings.need(findings.left + 1000)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"found {', '.join(found)}"


# Its weight gives the part that never ends a few seconds.
PARTS = [
    Part("endless", f"{MODULE}:endless", 0.25, lines),
    *(Part(name, f"{MODULE}:{name}", 1, lines) for name in ("good", "wrong", "crashing", "crowded")),
]


if __name__ == "__main__":
    sys.exit(run(MODULE, parts_parser(MODULE, "Parts that end in every way."), lambda _: PARTS, None))
