"""An accelerator in parts: bounds, start, right tokens, families, steps, prompts, requests, pipelines, layers' times.

    python -m benchmarks.gpu --out FOLDER [--device cuda] [--seconds 530] [--tiny] [--only PART ...]

It needs neither a network nor a checkpoint: models have real shapes and drawn weights. Each part is a process of its
own, and leaves its figures in FOLDER/PART.json as they come. ``--device cpu --tiny`` shows within minutes that all of
it works. Whatever else uses the device spoils the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu import summary
from benchmarks.shared.timed_parts import Part, parts_parser, run

MODULE = "benchmarks.gpu"
PARTS = (
    Part("facts", f"{MODULE}.facts:measure", 15, summary.facts),
    Part("start", f"{MODULE}.engines:start", 80, summary.start),
    Part("right", f"{MODULE}.right:measure", 60, summary.right),
    Part("families", f"{MODULE}.every_family:measure", 100, summary.families),
    Part("steps", f"{MODULE}.steps:measure", 110, summary.steps),
    Part("kernels", f"{MODULE}.steps:kernels", 30, summary.kernels),
    Part("prefill", f"{MODULE}.steps:prefill", 45, summary.prefill),
    Part("many", f"{MODULE}.engines:many", 75, summary.many),
    Part("pipeline", f"{MODULE}.engines:pipeline", 110, summary.pipeline),
    Part("profile", f"{MODULE}.engines:layers", 50, summary.profile),
)
"""The parts in their order. A weight is about the seconds that a part takes with a large GPU."""


def parts_of(options: argparse.Namespace) -> list[Part]:
    """All parts. Tiny ones take about the same time, most of it for their imports."""
    return [replace(part, weight=1) if options.tiny else part for part in PARTS]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parts_parser(MODULE, "Measure an accelerator in parts.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (default: cuda)")
    return run(MODULE, parser, parts_of, arguments)


if __name__ == "__main__":
    sys.exit(main())
