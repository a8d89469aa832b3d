"""`auto` beside plain decoding on real stages, chat by chat: sets x threads x formats x stages, nothing emulated.

    python -m benchmarks.strategies.auto_chats MODEL PROMPTS OUT [--minutes 60] [--only WORD ...] [--chats 10] [--again]

MODEL is a chat model's folder, or a GGUF file of four bits for the cells of ``int4`` only, PROMPTS a folder of question
files, OUT a JSON file of the seconds of every answer. Each of a set's chats is answered greedily, plainly and with
`auto`, in turn. An engine is opened for each combination of threads, format, stages and drafter, and answers the chats
of all sets in turn: first half of each set's by every engine, then the other half, so that a partial run has every
cell. Answers have 64 to 256 tokens, in the cells called ``short`` 8 to 16. ``wrong`` is a drafter that is never right,
whose answers the engine decodes beforehand. ``none`` is plain decoding beside itself: its cells show what the host's
noise makes of as many chats.

A chat that is in OUT is not answered again: a run that was stopped, or whose minutes are up, goes on where it was.
Delete the file after a change of the engine. At the end, each cell's speed over plain decoding is printed with its 95%
bounds, and written to benchmarks/measured/strategies/auto_chats.json. With ``--again``, and another OUT, the cells
below are answered a second time, with as many chats, and stored beside the first. Stop whatever else runs on the host,
or the figures mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.measured import kept_figures, store, write_json
from benchmarks.strategies.shared_host import questions, ratio_over
from penstock import LLM, SamplingParams
from penstock.lab.bench.comparison import measure_all
from penstock.lab.grid import Question, parse_entries

NAME, HOW = "auto_chats", "Measured on two cores, with SmolLM2-135M-Instruct, nothing emulated"
ENTRIES = ("autoregressive", "auto")
NONE: Final = "none"
"""Drafter of the cells in which both ways decode plainly."""
LENGTHS: Final = {"long": (64, 256), "short": (8, 16)}
"""Fewest and most tokens of an answer; the chats of a set are spread evenly over them."""
DRAFTERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "lookup": {"method": "ngram"},
    "wrong": {"method": "synthetic", "accuracy": [0.0, 0.0]},
    NONE: {"method": "ngram"},
}
PASSES: Final = 2
"""Parts of the chats that are answered one after the other, each by every engine."""


@dataclass(frozen=True)
class Engine:
    """One engine's options; ``length`` is a name of ``LENGTHS``."""

    threads: int
    quantization: str
    stages: int
    drafter: str = "lookup"
    length: str = "long"

    @property
    def name(self) -> str:
        counts = f"{self.threads} threads, {self.quantization}, {self.stages} stages"
        return f"{counts}, {self.drafter}, {self.length}"


def engines() -> list[Engine]:
    """All engines, the most different ones first: any first few of them say something of every option."""
    every = [Engine(*one) for one in product((1, 2), ("int4", "int8"), (1, 2))]
    half = [one for one in every if (one.threads + one.stages + (one.quantization == "int4")) % 2]
    others = [Engine(2, "int8", 2, "wrong"), Engine(1, "int4", 2, "lookup", "short"), Engine(2, "int4", 1, "wrong")]
    others += [Engine(2, "int4", 2, NONE), Engine(1, "int4", 1, NONE)]
    return [*half, *others, *(one for one in every if one not in half)]


def asked(llm: LLM, options: argparse.Namespace, engine: Engine, part: range) -> list[Question]:
    """The part's chats of every set, the sets in turn."""
    fewest, most = LENGTHS[engine.length]
    every = questions(llm, options.prompts, options.chats, SamplingParams(temperature=0, ignore_eos=True))
    chosen = [(one, one.number // options.sets) for one in every if one.number // options.sets in part]
    steps = max(1, options.chats - 1)
    return [
        replace(one, params=replace(one.params, max_tokens=fewest + (most - fewest) * chat // steps))
        for one, chat in chosen
    ]


def answered(options: argparse.Namespace, engine: Engine, part: range, found: dict[str, Any], ends: float) -> None:
    """Answer the part's chats that are not in ``found``, and write it after each of them, until ``ends``."""
    of_engine = found.setdefault(engine.name, {})
    names = options.cells.get(engine.name, []) if options.again else options.names
    listed = {f"{name} {chat}" for chat in part for name in names} - set(of_engine)
    if not listed or time.monotonic() > ends:
        return
    named = parse_entries(ENTRIES, dict(DRAFTERS[engine.drafter]))
    config = named[1][1]
    if engine.drafter == NONE:
        named = [(entry, None) for entry in ENTRIES]
    own: dict[str, Any] = {"threads": engine.threads, "pipeline_parallel_size": engine.stages}
    if not options.model.endswith(".gguf"):
        own["quantization"] = engine.quantization
    with LLM(options.model, speculative_config=config, **own) as llm:
        left = [one for one in asked(llm, options, engine, part) if key_of(one, options) in listed]
        # Several chats at a time: each call of ``measure_all`` begins with nothing learned.
        for run in measure_all(llm, left, named):
            of_set = [one for one in left if one.setting.prompt_set == run.prompt_set]
            for question, one in zip(of_set, run.requests, strict=True):
                taken = of_engine.setdefault(key_of(question, options), {"tokens": question.params.max_tokens})
                taken[run.strategy] = round(one["seconds"], 4)
    write_json(options.out, found)


def key_of(question: Question, options: argparse.Namespace) -> str:
    return f"{question.setting.prompt_set} {question.number // options.sets}"


LEAST_MEAN, LEAST_LOW = 0.98, 0.95
"""A cell whose mean or lower bound is less is measured once more."""
ALL = "all"
Cell = tuple[float, float | None, int]
"""Mean speed over plain decoding, its lower 95% bound, and the chats; without a bound where there is one chat."""


def cells_of(chats: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> dict[str, Cell]:
    """Each set's cell, and that of all chats where there are chats of all sets."""
    found: dict[str, Cell] = {}
    for name in (*names, ALL):
        of_set = [one for key, one in chats.items() if name == ALL or key.startswith(f"{name} ")]
        if of_set and (name != ALL or set(names) <= set(found)):
            ratio = ratio_over([{entry: [one[entry] for one in of_set] for entry in ENTRIES}], *ENTRIES)
            low = None if ratio.low is None else round(ratio.low, 4)
            found[name] = round(ratio.mean, 4), low, ratio.pairs
    return found


def below(cell: Sequence[Any]) -> bool:
    mean, low, _ = cell
    return mean < LEAST_MEAN or (low is not None and low < LEAST_LOW)


def lines(cells: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    for engine, of_engine in cells.items():
        for name, (mean, low, chats) in of_engine.items():
            bound = "" if low is None else f" (from {low:.3f})"
            verdict = "  below" if below((mean, low, chats)) else ""
            yield f"{engine:46} {name:12} {chats:3} chats {mean:.3f}{bound}{verdict}"


def keep(cells: Mapping[str, Mapping[str, Cell]], *, again: bool) -> None:
    """Store the cells, as each cell's first or second measurement."""
    figures = kept_figures(NAME) if again else {}
    for engine, of_engine in cells.items():
        kept = figures.setdefault(engine, {})
        for name, cell in of_engine.items():
            kept[name] = [*kept.get(name, [])[:1], cell] if again else [cell]
    store(NAME, HOW, (["python -m benchmarks.strategies.auto_chats MODEL PROMPTS OUT"], figures))


def main() -> None:
    parser = argparse.ArgumentParser(description="auto beside plain decoding on real stages, chat by chat")
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    os.environ["PENSTOCK_FORGET"] = "1"  # so that nothing learned in one cell reaches the next
    options.names = [path.stem for path in sorted(options.prompts.glob("*.jsonl"))]
    options.sets = len(options.names)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    ends = time.monotonic() + 60 * options.minutes
    if options.again:
        first = {
            engine: {name: cells[0] for name, cells in kept.items()} for engine, kept in kept_figures(NAME).items()
        }
        options.cells = {engine: [name for name, cell in of.items() if below(cell)] for engine, of in first.items()}
    chosen = [engine for engine in engines() if all(word in engine.name for word in options.only)]
    if options.model.endswith(".gguf"):
        chosen = [engine for engine in chosen if engine.quantization == "int4"]
    size = -(-options.chats // PASSES)
    for begin, engine in product(range(0, options.chats, size), chosen):
        answered(options, engine, range(begin, min(begin + size, options.chats)), found, ends)
        print(f"{engine.name}: chats {begin} to {min(begin + size, options.chats) - 1} of each set", flush=True)
    cells = {engine: cells_of(chats, options.names) for engine, chats in found.items() if chats}
    print("\n".join(lines(cells)))
    keep(cells, again=options.again)


if __name__ == "__main__":
    main()
