"""How often drafters know a real model's next token, by prompt set, at T = 0 and T = 1.

    python -m benchmarks.drafters.drafter_acceptance MODEL PROMPTS [--drafter KIND=FOLDER ...] [--per-set N]

MODEL is a chat model's folder or GGUF file, PROMPTS a folder of question files, FOLDER the output of ``penstock train
KIND``. The model answers the first turns in float32. Then every drafter reads the answers as in training: it is asked
at every token, with the text's own tokens before it, and ranks its candidates with the noise by which the target has
picked. The result depends on no clock and no strategy. Prompt lookup comes first, as the drafter that needs no
training.

A drafter's figures are written to benchmarks/measured/drafters/drafter_acceptance.json, replacing older ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.reading import Answer, Reader, answer_of
from benchmarks.strategies.shared_host import questions
from penstock import LLM, SamplingParams
from penstock.drafters.merged import Followers
from penstock.stage.sampler import rank_one

NAME, HOW = "drafter_acceptance", "Measured, with SmolLM2-135M-Instruct"
TEMPERATURES = (0.0, 1.0)
LOOKUP = "ngram"
LONGEST, SHORTEST = 4, 1
"""Longest and shortest run of tokens that prompt lookup looks for, as by default."""
AMONG = (1, 4, 16)


def answers(options: argparse.Namespace) -> list[Answer]:
    params = [SamplingParams(temperature=one, max_tokens=options.tokens) for one in TEMPERATURES]
    with LLM(options.model, quantization="none", dtype="float32", threads=1, speculative_config=None) as llm:
        asked = [one for some in params for one in questions(llm, options.prompts, options.per_set, some)]
        outputs = llm.generate([one.prompt for one in asked], [one.params for one in asked])
    return [answer_of(one.setting.prompt_set, output, one.params) for one, output in zip(asked, outputs, strict=True)]


# ------------------------------------------------------------------------------------------------------------ drafters

Ranks = list[list[int | None]]
"""Ranks by step: for each token of an answer its index among the candidates; None where it is not among them."""


def looked_up(answer: Answer) -> Ranks:
    text = Followers(LONGEST, SHORTEST)
    text.extend(answer.tokens[: answer.first])
    ranks: list[int | None] = []
    for token in answer.tokens[answer.first :]:
        ranks.append(place_of(token, list(text.after([], max(AMONG)))))
        text.extend([token])
    return [ranks]


def place_of(token: int, candidates: Sequence[int]) -> int | None:
    return next((place for place, one in enumerate(candidates[: max(AMONG)]) if one == token), None)


def ranks_of(reader: Reader, answer: Answer) -> Ranks:
    _, steps = reader.read(answer)
    return [
        [
            place_of(answer.tokens[position], rank_one(logits_V, answer.sampling, position, 0, max(AMONG)).tokens)
            for position, logits_V in enumerate(logits, len(answer.tokens) - len(logits))
        ]
        for logits in steps
    ]


# ------------------------------------------------------------------------------------------------------------- figures


def counted(answered: Sequence[tuple[Answer, Ranks]]) -> dict[str, dict[str, Any]]:
    """Number of tokens and of those among the best of ``AMONG``, by temperature, set and step."""
    found: dict[str, dict[str, Any]] = {}
    for answer, ranks in answered:
        sets = found.setdefault(str(answer.sampling.temperature), {})
        steps = sets.setdefault(answer.prompt_set, [[0] * (1 + len(AMONG)) for _ in ranks])
        for counts, places in zip(steps, ranks, strict=True):
            counts[0] += len(places)
            for i, among in enumerate(AMONG):
                counts[1 + i] += sum(place is not None and place < among for place in places)
    return found


def shares(counts: Sequence[int]) -> str:
    """The counts in percent."""
    return ", ".join(f"{100 * hits / counts[0]:.0f}" for hits in counts[1:])


def together(sets: Mapping[str, Any], step: int = 0) -> list[int]:
    """The counts of one step over all sets."""
    return [sum(column) for column in zip(*(steps[step] for steps in sets.values()), strict=True)]


def main(benchmark: Benchmark, options: argparse.Namespace) -> None:
    asked = answers(options)
    longest = max(len(one.tokens) for one in asked)
    figures = kept_figures(NAME)
    for drafter in (LOOKUP, *options.drafter):
        kind, _, folder = drafter.partition("=")
        reader = None if kind == LOOKUP else Reader(options.model, kind, folder, options.stages, longest)
        ranks = [(one, looked_up(one) if reader is None else ranks_of(reader, one)) for one in asked]
        figures[kind] = {"per_set": options.per_set, "tokens": options.tokens, "temperatures": counted(ranks)}
        given = "".join(f"--drafter {name}=FOLDER " for name in figures if name != LOOKUP)
        benchmark.keep(figures, f"MODEL PROMPTS {given}--per-set {options.per_set} --tokens {options.tokens}")
        show({temperature: together(sets) for temperature, sets in figures[kind]["temperatures"].items()}, kind)


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    drafters = {"action": "append", "default": [], "metavar": "KIND=FOLDER"}
    stages = {"type": int, "default": 2, "help": "of the pipeline that spd drafts for"}
    parser = benchmark.parser(model=str, prompts=Path, drafter=drafters, stages=stages, per_set=4, tokens=64)
    main(benchmark, parser.parse_args())
