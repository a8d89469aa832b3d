"""SPD's Tables 3 to 5 with a real instruct model: MT-Bench, GSM8K and HumanEval, as chats.

    python -m benchmarks.drafters.spd_chats MODEL PROMPTS --spd DIR ... --early-exit DIR ... --eagle3 DIR ...

MODEL is a chat model's folder or GGUF file, PROMPTS a folder with mt_bench.jsonl, gsm8k.jsonl and humaneval.jsonl,
whose first turns are asked as the model's chat template puts them. Rows, trees and temperatures are those of
``benchmarks.papers.spd_tables``, without its rows of output states, which these tables of the paper do not have. L' and
the theoretical speed-up are taken in ideal lockstep, in virtual time. The model computes in 4 bits, for which its
tokens are plain decoding's, too. Its stages are the engine's, alike in parameters, the head counting for the last one.

Each row is written to benchmarks/measured/drafters/spd_chats.json as it finishes. What is there with as many prompts
and tokens is not run again; remove the file after a change of the engine or of a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.spd_tables import METHODS, STAGES, TEMPERATURES, TOP_K, Method, in_lockstep, methods
from benchmarks.shared import virtual
from penstock import SamplingParams
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.engine.options import model_folder
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import Question, conversations_of, read_prompt_sets
from penstock.text.tokenizer import load_tokenizer

NAME: Final = "spd_chats"
HOW: Final = "In virtual time, with SmolLM2-135M-Instruct in 4 bits"
SETS: Final = {"mt_bench": "MT-Bench", "gsm8k": "GSM8K", "humaneval": "HumanEval"}
"""Prompt sets in the order of the paper's tables, 3 to 5."""


def chats(
    target: Checkpoint,
    folder: Path,
    name: str,
    sizes: virtual.Sizes,
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    seed: int = 0,
    top_k: int = TOP_K,
) -> list[Question]:
    """The first turns of a set's first conversations, at every temperature."""
    tokenizer = load_tokenizer(target.path)
    sets = read_prompt_sets([folder / f"{name}.jsonl"], sizes.prompts)
    params = SamplingParams(top_k=top_k, seed=seed, max_tokens=sizes.tokens)
    return [
        one.question(0, {"prompt_token_ids": tokenizer.apply_chat_template(said(one.turns[0]))})
        for one in conversations_of(sets, temperatures, 1, params, 1)
    ]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def measured(method: Method, questions: Sequence[Question], model: str) -> dict[str, Any]:
    """One row of one table."""
    runs = in_lockstep(method, questions, model=model, quantization="int4")
    return {
        "method": method.name,
        "stages": method.stages,
        "layers": method.layers,
        "cells": {name: cell(run, method.stages) for name, (run,) in runs.items()},
    }


def cell(run: StrategyRun, stages: int) -> dict[str, Any]:
    """``lengths`` are the requests' L', of which ``length`` is the geometric mean."""
    lengths = [stages * one["tokens"] / one["timesteps"] for one in run.requests if one["timesteps"]]
    return {
        "length": run.equivalent_acceptance_length,
        "lengths": [float(f"{one:.4g}") for one in lengths],
        "theoretical": run.theoretical_speedup,
        "tokens": run.tokens,
        "identical": run.identical_to_autoregressive,
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    """Every drafter over every number of stages, for each set: keyed by set and row."""
    options = wanted.options
    target = open_checkpoint(model_folder(options.model, "target"))
    questions = {name: chats(target, options.chats, name, wanted.sizes) for name in SETS}
    for stages in options.stages:
        first = target.even_split(stages)[0][1]
        for name, folders in wanted.drafters.items():
            for folder in folders:
                rows = [one for one in methods(name, folder, stages, target, first) if not one.output_states]
                for method, (of, asked) in product(rows, questions.items()):
                    yield f"{of} {method.key}", partial(measured, method, asked, options.model)


if __name__ == "__main__":
    chats_of = {"type": Path, "metavar": "prompts"}
    over = {"type": int, "nargs": "+", "default": [STAGES[0]], "choices": STAGES}
    virtual.main(__file__, cases, METHODS, HOW, given="MODEL PROMPTS", model=str, chats=chats_of, stages=over)
