"""Answers in points: how often the target's decision is right, and tokens per second beside plain decoding.

    python -m benchmarks.strategies.outlines decisions MODEL PROMPTS [--per-category N]
    python -m benchmarks.strategies.outlines speed MODEL [--cluster NAME] [--questions N] [--tokens N]
    python -m benchmarks.strategies.outlines ids MODEL [--questions N] [--tokens N]

PROMPTS is a folder of JSON lines, a file for each set, whose lines have `turns` and a `category`. Speed is measured
over four stages of this host or, in virtual time, of a cluster that is modelled: the model's own outlines and points,
in the time that the cluster's devices take. Tokens are the points' own, without titles. Seconds count from the question
to the last token, so that they hold prompt and outline. Ids are each point's beside those of plain decoding of its own
prompt, over one stage. The figures are stored in
benchmarks/measured/strategies/outlines.json, part by part. Stop whatever else runs on the host while its own speed is
measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.papers.jupiter import ACCURACY, CHAIN
from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.measured import kept_figures
from penstock import LLM, RequestOutput, SamplingParams
from penstock.engine.llm import job_of, prepare
from penstock.lab.grid import parse_entries
from penstock.outlines.steps import Dialogue
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessExecutor
from penstock.text.chat import ChatFormat

NAME: Final = "outlines"
HOW: Final = "Measured with SmolLM2-135M-Instruct (Q4_1) on two cores, or in virtual time where it says so"
STAGES: Final = 4
TEMPERATURES: Final = (0.0, 1.0)
MODES: Final = ("off", "on")
LISTS: Final = (
    "What are the benefits of regular exercise?",
    "How can I save money on groceries?",
    "What are the advantages of working from home?",
    "How do I prepare for a job interview?",
    "What are the main causes of air pollution?",
    "What should I pack for a trip to the mountains?",
)
"""Questions whose answers are lists."""
WATER: Final = "Name some uses of water."
"""A question asked before all others, to fill the prefix cache with guides and to learn times."""
ENGINES: Final[dict[str, Any]] = {"plain": None, "prompt lookup": {"method": "ngram"}}
SCRIPTED: Final[dict[str, Any]] = {"method": "synthetic", "accuracy": ACCURACY}
"""A drafter that is right as often as that of Jupiter's tables."""


def questions(folder: Path, per_category: int) -> Iterator[tuple[str, str]]:
    """Pairs of category and question; a set without categories is one under its name."""
    for file in sorted(folder.glob("*.jsonl")):
        seen: Counter[str] = Counter()
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            category = file.stem if not record["category"] else f"{file.stem}: {record['category']}"
            seen[category] += 1
            if seen[category] <= per_category:
                yield category, record["turns"][0]


def decisions(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Number of questions' answers in each form, by category."""
    asked = list(questions(options.prompts, options.per_category))
    found: dict[str, Counter[str]] = {category: Counter() for category, _ in asked}
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(str(options.model), speculative_config=None, threads=2) as llm:
        for category, question in asked:
            found[category][form_of(llm, question, params)] += 1
    return {category: dict(counts) for category, counts in found.items()}


def form_of(llm: LLM, question: str, params: SamplingParams) -> str:
    """The form that the target chooses for an answer; nothing of the answer itself is decoded."""
    dialogue = Dialogue(llm.get_tokenizer(), [{"role": "user", "content": question}], ChatFormat())
    steps = llm.steps(dialogue, params, "auto")
    step = next(steps)
    while step.report.kind is None and not step.last:
        prepare(llm, step.asks)
        step = steps.send(llm.complete([job_of(llm, ask) for ask in step.asks]))
    return step.report.kind or "too long"


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens and seconds of every way of answering each question; the ways take turns."""
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    found, asked = [], [chat_of(question) for question in LISTS[: options.questions]]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(one) for name, one in engines_of(options)}
        for engine in engines.values():
            get_ready(engine, asked, params)
        for question in asked:
            for name, engine in engines.items():
                for mode in MODES:
                    (output,) = engine.chat(question, params, outline_decoding=mode)
                    found.append({"question": question[0]["content"], "engine": name, "mode": mode, **timed(output)})
                    print(found[-1], flush=True)
    return found


def chat_of(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def engines_of(options: argparse.Namespace) -> Iterator[tuple[str, LLM]]:
    """Pairs of name and engine: over stages of this host, with each drafter, or over a cluster's in virtual time."""
    model = str(options.model)
    if not options.cluster:
        for name, config in ENGINES.items():
            yield name, LLM(model, pipeline_parallel_size=STAGES, speculative_config=config, threads=1)
        return
    torch.set_num_threads(1)
    ((_, chain),) = parse_entries([CHAIN], SCRIPTED)
    for name, config in {**ENGINES, "its chain": chain, "auto": SCRIPTED}.items():
        host = InProcessExecutor(VirtualClock())
        yield name, LLM(model, host=host, cluster=options.cluster, speculative_config=config)


def get_ready(engine: LLM, asked: Sequence[Any], params: SamplingParams) -> None:
    """Teach the scripted drafter its answers, and leave nothing but the guides in the prefix cache."""
    for mode in MODES:
        engine.chat(asked, params, outline_decoding=mode)
    engine.loop.scheduler.pool.forget_cached()
    engine.chat(chat_of(WATER), params, outline_decoding="on")


def same_ids(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Points, their tokens, and the number of points that differ from plain decoding, by engine and temperature."""
    model, found = str(options.model), []
    with LLM(model, speculative_config=None, threads=1, enable_prefix_caching=False) as reference:
        for name, config in ENGINES.items():
            with LLM(model, pipeline_parallel_size=STAGES, speculative_config=config, threads=1) as engine:
                for temperature in TEMPERATURES:
                    params = SamplingParams(temperature=temperature, seed=1, max_tokens=options.tokens)
                    asked = [chat_of(question) for question in LISTS[: options.questions]]
                    outputs = engine.chat(asked, params, outline_decoding="on")
                    points = [one for output in outputs if output.outline for one in output.outline.points]
                    differ = sum(differs(reference, point, params) for point in points)
                    tokens = sum(len(point.outputs[0].token_ids) for point in points)
                    told = {"points": len(points), "tokens": tokens, "differ": differ}
                    found.append({"engine": name, "temperature": temperature, **told})
                    print(found[-1], flush=True)
    return found


def differs(reference: LLM, point: RequestOutput, params: SamplingParams) -> bool:
    """Whether plain decoding of a point's prompt gives other tokens."""
    ids = point.outputs[0].token_ids
    (plain,) = reference.generate({"prompt_token_ids": point.prompt_token_ids}, replace(params, max_tokens=len(ids)))
    return plain.outputs[0].token_ids != ids


def timed(output: RequestOutput) -> dict[str, Any]:
    answer, outline = output.outputs[0], output.outline
    guides = [] if outline is None else [len(guide.outputs[0].token_ids) for guide in outline.guides]
    return {
        "tokens": len(answer.token_ids),
        "seconds": round(answer.seconds or 0.0, 3),
        "points": len(outline.points) if outline is not None else 0,
        "outline_tokens": sum(guides),
    }


def main(benchmark: Benchmark, options: argparse.Namespace) -> None:
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {"decisions": decisions, "speed": speed, "ids": same_ids}
    found, figures = parts[options.part](options), kept_figures(NAME)
    if options.part == "speed":
        figures.setdefault("speed", {})[options.cluster or "this host"] = found
    else:
        figures[options.part] = found
    typed = " ".join(sys.argv[1:]).replace(str(options.model), "MODEL.gguf").replace(str(options.prompts), "PROMPTS")
    figures.setdefault("commands", {})[f"{options.part} {options.cluster}".strip()] = benchmark.command(typed)
    benchmark.keep(figures, commands=list(figures["commands"].values()))


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    part, prompts = {"choices": ("decisions", "speed", "ids")}, {"type": Path, "nargs": "?"}
    sizes = {"per_category": 10, "cluster": "", "questions": len(LISTS), "tokens": 160}
    main(benchmark, benchmark.parser(part=part, model=Path, prompts=prompts, **sizes).parse_args())
