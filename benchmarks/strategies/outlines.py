"""Answers in points: how often the target's decision is right, and tokens per second beside plain decoding.

    python -m benchmarks.strategies.outlines decisions MODEL PROMPTS [--per-category N]
    python -m benchmarks.strategies.outlines speed MODEL [--cluster NAME] [--questions N] [--tokens N]

PROMPTS is a folder of JSON lines, a file for each set, whose lines have `turns` and a `category`. Speed is measured
over four stages, of a cluster that is emulated or of this host. Tokens are the points' own, without titles. Seconds
count from the question to the last token, so that they hold prompt and outline. The figures are stored in
benchmarks/measured/strategies/outlines.json, part by part. Stop whatever else runs on the host while speed is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.measured import kept_figures, store
from penstock import LLM, RequestOutput, SamplingParams
from penstock.engine.outlined.offline import complete_step
from penstock.outlines.dialogue import Dialogue
from penstock.text.chat import ChatFormat

NAME: Final = "outlines"
HOW: Final = "Measured with SmolLM2-135M-Instruct (Q4_1) on two cores"
COMMAND: Final = "python -m benchmarks.strategies.outlines"
STAGES: Final = 4
LISTS: Final = (
    "What are the benefits of regular exercise?",
    "How can I save money on groceries?",
    "What are the advantages of working from home?",
    "How do I prepare for a job interview?",
    "What are the main causes of air pollution?",
    "What should I pack for a trip to the mountains?",
)
"""Questions whose answers are lists."""
ENGINES: Final[dict[str, Any]] = {"plain": None, "speculation": {"method": "ngram"}}


def questions(folder: Path, per_category: int) -> Iterator[tuple[str, str]]:
    """Category and question; a set without categories is one by its name."""
    for file in sorted(folder.glob("*.jsonl")):
        seen: Counter[str] = Counter()
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            category = file.stem if not record["category"] else f"{file.stem}: {record['category']}"
            seen[category] += 1
            if seen[category] <= per_category:
                yield category, record["turns"][0]


def decisions(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """By category, how many questions' answers were given which form."""
    asked = list(questions(options.prompts, options.per_category))
    found: dict[str, Counter[str]] = {category: Counter() for category, _ in asked}
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(str(options.model), speculative_config=None, threads=2) as llm:
        for category, question in asked:
            found[category][form_of(llm, question, params)] += 1
    return {category: dict(counts) for category, counts in found.items()}


def form_of(llm: LLM, question: str, params: SamplingParams) -> str:
    """What the target is asked first; nothing of the answer is decoded."""
    dialogue = Dialogue(llm.get_tokenizer(), [{"role": "user", "content": question}], ChatFormat())
    steps = llm.steps(dialogue, params, "auto")
    step = next(steps)
    while step.report.kind is None and not step.last:
        step = steps.send(complete_step(llm, step))
    return step.report.kind or "too long"


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """For every question, and every way of answering it, tokens and seconds; the ways take turns."""
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    place: dict[str, Any] = {"cluster": options.cluster} if options.cluster else {"threads": 1}
    found = []
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(str(options.model), pipeline_parallel_size=STAGES, speculative_config=config, **place)
            )
            for name, config in ENGINES.items()
        }
        for engine in engines.values():  # guides are there, and times are learned
            engine.chat([{"role": "user", "content": "Name some uses of water."}], params, outline_decoding="on")
        for question in LISTS[: options.questions]:
            for name, engine in engines.items():
                for mode in ("off", "on"):
                    (output,) = engine.chat([{"role": "user", "content": question}], params, outline_decoding=mode)
                    found.append({"question": question, "engine": name, "mode": mode, **timed(output)})
                    print(found[-1])
    return found


def timed(output: RequestOutput) -> dict[str, Any]:
    answer, outline = output.outputs[0], output.outline
    return {
        "tokens": len(answer.token_ids),
        "seconds": round(answer.seconds or 0.0, 3),
        "points": len(outline.points) if outline is not None else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers in points: decisions, and speed")
    parser.add_argument("part", choices=("decisions", "speed"))
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, nargs="?")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--cluster", default="")
    parser.add_argument("--questions", type=int, default=len(LISTS))
    parser.add_argument("--tokens", type=int, default=160)
    options = parser.parse_args()
    figures = kept_figures(NAME)
    if options.part == "decisions":
        figures["decisions"] = decisions(options)
    else:
        figures.setdefault("speed", {})[options.cluster or "this host"] = speed(options)
    typed = f"{COMMAND} {' '.join(sys.argv[1:])}".replace(str(options.model), "MODEL.gguf")
    figures.setdefault("commands", {})[f"{options.part} {options.cluster}"] = typed.replace(
        str(options.prompts), "PROMPTS"
    )
    commands = list(figures["commands"].values())
    store(NAME, HOW, (commands, figures))


if __name__ == "__main__":
    main()
