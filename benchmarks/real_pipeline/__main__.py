"""Stages of one host on cores of their own, nothing emulated: every strategy beside plain decoding, in every format.

    python -m benchmarks.real_pipeline --out FOLDER [--cores N] [--model FILE.gguf] [--seconds 530] [--tiny]

The demo pair, and the model that is named, are decoded over 2 to 8 stages on N cores: plainly, with a static tree,
PipeDec, FlowSpec and `auto`. The drafters are those that ship: the pair's draft model and two learned ones, and prompt
lookup for a model of one's own. All entries decode the same prompts in turn, so that whatever else happens on the host
hits all alike, and each one's tokens are compared with plain decoding's. A part is one model in one format of weights,
in a process of its own, with its figures in FOLDER/PART.json as they come. It needs no network. Stop whatever else runs
on the host, or the figures mean little.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.real_pipeline.engines import DEMO, OWN
from benchmarks.shared.formats import EXACT_FORMATS
from benchmarks.shared.timed_parts import Part, parts_parser, run
from penstock.hosts.facts import usable_cores

MODULE: Final = "benchmarks.real_pipeline"
LEAST_CORES: Final = 2
TINY_FORMATS: Final = ("float32", "int8")


def parts_of(options: argparse.Namespace) -> list[Part]:
    """A part for every model and format, the formats in turn, so that each has some figures if time runs out."""
    formats = TINY_FORMATS if options.tiny else tuple(EXACT_FORMATS)
    models = [DEMO, *([OWN] if options.model else [])]
    measure = f"{MODULE}.runs:measure"
    return [Part(f"{model}-{form}", measure, 1, summary) for form in formats for model in models]


def summary(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each engine: its stages, its drafter, and each entry's speed over plain decoding.

    Texts that loop flatter every drafter, so that their number is told.
    """
    for name, one in found.items():
        if isinstance(one, Mapping):
            plain, *others = one["entries"]
            ratios = ", ".join(ratio_of(entry) for entry in others)
            shared = "" if one["own_cores"] else f" ({one['processes']} processes share {one['cores']} cores)"
            looping = plain["looping"]
            asked = f"prompts: {one['prompts']}, answers that loop: {looping}"
            yield f"{name}{shared}, {asked}: plain {plain['tokens_per_second']:.1f} tokens/s; {ratios}"


def ratio_of(entry: Mapping[str, Any]) -> str:
    if entry["ratio"] is None:
        return f"{entry['strategy']} no ratio"
    bounds = "" if entry["bounds"] is None else " ({:.2f} to {:.2f})".format(*entry["bounds"])
    return (
        f"{entry['strategy']} {entry['ratio']:.2f}x{bounds}{' same tokens' if entry['identical'] else ' OTHER TOKENS'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parts_parser(MODULE, "Measure a pipeline of processes on this host, with nothing emulated.")
    found = usable_cores()
    parser.add_argument("--cores", type=int, default=found, help=f"to use (default: those there are, {found})")
    parser.add_argument(
        "--model", metavar="FILE.gguf", help="a chat model to measure as well: a GGUF file, or a folder"
    )

    def checked(options: argparse.Namespace) -> list[Part]:
        if not LEAST_CORES <= options.cores <= found:
            parser.error(f"--cores is {options.cores}; this host has {found}, and two stages need {LEAST_CORES}")
        return parts_of(options)

    return run(MODULE, parser, checked, arguments)


if __name__ == "__main__":
    sys.exit(main())
