"""Quality of answers in points beside plain ones: ``penstock bench quality``, with a judge and without.

    python -m benchmarks.strategies.quality alone MODEL PROMPTS [--sets NAME ...] [--per-category N] [--tokens N]
    python -m benchmarks.strategies.quality judged MODEL PROMPTS [--sets NAME ...] [--per-category N] [--tokens N]

PROMPTS is a folder of JSON lines, a file for each set. Every question is answered in points, whatever its form is.
`judged` has ``penstock serve MODEL`` grade both answers: the model judges itself. The figures are stored in
benchmarks/measured/strategies/quality.json, part by part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.commands import with_json_file
from benchmarks.shared.measured import kept_figures, path_of, stored
from benchmarks.shared.served import served

NAME: Final = "quality"
HOW: Final = "Measured with SmolLM2-135M-Instruct (Q4_1)"
SETS: Final = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")


def quality(options: argparse.Namespace, judge: Sequence[str] = ()) -> dict[str, Any]:
    """The output of ``penstock bench quality --json``."""
    files = [f"--prompts={options.prompts / name}.jsonl" for name in options.sets]
    sizes = [f"--num-prompts={options.per_category}", f"--max-tokens={options.tokens}", "--threads=1"]
    _, found = with_json_file(["bench", "quality", f"--model={options.model}", *files, *sizes, *judge])
    found["settings"]["model"] = options.model.name
    return dict(found)


def judged(options: argparse.Namespace) -> dict[str, Any]:
    with served(str(options.model), "--threads", "1") as server:
        found = quality(options, [f"--judge={server.url}/v1"])
    found["settings"]["judge_model"] = options.model.name
    return found


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    part = {"choices": ("alone", "judged")}
    options = benchmark.parser(part=part, model=Path, prompts=Path, sets=SETS, per_category=6, tokens=192).parse_args()
    found = quality(options) if options.part == "alone" else judged(options)
    typed = " ".join(sys.argv[1:]).replace(str(options.model), "MODEL.gguf").replace(str(options.prompts), "PROMPTS")
    commands = stored(NAME).commands if path_of(NAME).exists() else []
    others = [one for one in commands if f"quality {options.part} " not in one]
    benchmark.keep({**kept_figures(NAME), options.part: found}, commands=[*others, benchmark.command(typed)])
