"""The parts of a real model's step, without emulation: which operations, and what is left for engine and messages.

    python -m benchmarks.costs.step --model MODEL [--threads N] [--formats NAME ...] [--store]

MODEL is a folder or a GGUF file. For each format of weights, one stage in this process is measured by rows of one
request: its linear layers, attention, the head, the pick, and the rest (norms, rotary embeddings, activations,
residuals, and Python between them). Then whole engines over one stage and two decode plainly, with several numbers of
requests at a time: the time from result to result, and how much of it the stages computed. Figures are medians.
``--store`` keeps them for docs/background/results/real-models.md. Stop whatever else runs on the host.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from benchmarks.shared.formats import FORMATS
from benchmarks.shared.measured import kept_figures, store
from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.engine.loop import Observer
from penstock.hosts.facts import usable_cores
from penstock.messages import Result, Sampling
from penstock.models.attention import SlotAttention
from penstock.models.linear import BlockLinear
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.visibility import BatchView, RequestView

NAME: Final = "step"
HOW: Final = "Measured, with SmolLM2-135M-Instruct"
COMMAND: Final = "python -m benchmarks.costs.step --model SmolLM2-135M-Instruct.Q4_1.gguf --threads {} --store"
ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
PROFILED: Final = (1, 4, 16)
REQUESTS: Final = (1, 4, 16)
STAGES: Final = (1, 2)
CONTEXT: Final = 200
"""Tokens that the rows see besides each other, which is also the prompts' length."""
REPEATS: Final = 30
TOKENS: Final = 48
LINEARS: Final = {"qkv", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"} | {
    "gate_up",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
}


class Stopwatch:
    """Adds up the time spent in each part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            self.seconds[part] += time.perf_counter() - start
            return result

        return run


@contextmanager
def watched(stage: StageModel) -> Iterator[Stopwatch]:
    """Let linear layers and attention of ``stage`` report to the stopwatch; those compiled into one call cannot."""
    watch, attend = Stopwatch(), SlotAttention.__call__
    linears = [module for module in linears_of(stage) if not isinstance(module, BlockLinear)]
    for module in linears:
        module.forward = watch.timed("linear layers", module.forward)
    SlotAttention.__call__ = watch.timed("attention", attend)  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        SlotAttention.__call__ = attend  # type: ignore[method-assign]
        for module in linears:
            del module.forward


def linears_of(stage: StageModel) -> list[Any]:
    return [module for name, module in stage._base.named_modules() if name.rpartition(".")[2] in LINEARS]


def alone(stage: StageModel, rows: int) -> float:
    """Seconds of the compiled products, called one after another without the code between them."""
    linears = [module for module in linears_of(stage) if isinstance(module, BlockLinear)]
    given = {module.inputs: torch.randn(rows, module.inputs) for module in linears}

    def products() -> None:
        for module in linears:
            module.product(given[module.inputs])

    products()
    return median(seconds_of(products) for _ in range(REPEATS)) if linears else 0.0


def chain_view(rows: int) -> BatchView:
    """Rows of one request, each the child of the one before, after CONTEXT committed slots."""
    own, seen = np.arange(CONTEXT, CONTEXT + rows), np.arange(CONTEXT + rows)
    request = RequestView(0, np.arange(rows), seen, seen, seen[None, :] <= own[:, None])
    return BatchView(own * 0, own, own, own, 100 + np.arange(rows), [request], parents=own - 1)


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def whole_step(stage: StageModel, rows: int) -> float:
    """Milliseconds of a batch through the one stage, the pick after every row included."""
    view, wanted = chain_view(rows), list(range(rows))

    def step() -> None:
        stage.pick(view, stage.forward(view, None), wanted, [Sampling()] * rows)

    for _ in range(3):
        step()
    return 1e3 * median(seconds_of(step) for _ in range(REPEATS))


def parts(stage: StageModel, rows: int) -> dict[str, float]:
    """Milliseconds by part of the step with the median time."""
    view, wanted, taken, compiled = chain_view(rows), list(range(rows)), [], alone(stage, rows)
    for _ in range(REPEATS):
        with watched(stage) as watch:
            start = time.perf_counter()
            hidden = stage.forward(view, None)
            computed = time.perf_counter()
            logits = seconds_of(partial(stage.logits, hidden, wanted))
            picked = seconds_of(partial(stage.pick, view, hidden, wanted, [Sampling()] * rows))
        inside = dict(watch.seconds)
        inside["linear layers"] = inside.get("linear layers", compiled)
        rest = computed - start - sum(inside.values())
        taken.append(inside | {"the rest": rest, "head": logits, "pick": picked - logits})
    middle = sorted(taken, key=lambda one: sum(one.values()))[len(taken) // 2]
    return {part: 1e3 * seconds for part, seconds in middle.items()}


class Steps(Observer):
    """Collects when results come, and how long the stages computed for them."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, int]] = []
        """Time of arrival, seconds of all stages together, and rows, by result."""

    def arrived(self, result: Result, at: float) -> None:
        spans = result.spans
        self.seen.append((at, sum(span.computed for span in spans), max(span.rows for span in spans)))


def decoded(model: str, stages: int, requests: int, tokens: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of an engine, with ``own`` options, that decodes ``requests`` plainly, and its step's times."""
    ids = [{"prompt_token_ids": [100 + 7 * number, *range(200, 199 + CONTEXT)]} for number in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 1024, **own}
    with LLM(model, pipeline_parallel_size=stages, speculative_config=None, **options) as llm:
        llm.generate(ids, params)
        steps = Steps()
        with llm.observing(steps):
            llm.generate(ids, params)
        used = llm.setup.threads[0]
    decoding = steps.seen[len(steps.seen) // 2 :]  # the first half holds the prompts
    span = decoding[-1][0] - decoding[0][0]
    came = sum(rows for _, _, rows in decoding[1:])
    return {
        "stages": stages,
        "threads": used,
        "requests": requests,
        "tokens_per_second": came / span,
        "step_ms": 1e3 * span / (len(decoding) - 1),
        "computed_ms": 1e3 * median(computed for _, computed, _ in decoding),
    }


def measured(model: str, form: str, threads: int | None) -> dict[str, Any]:
    count = threads or usable_cores()
    torch.set_num_threads(count)
    layers = open_checkpoint(model).num_layers
    stage = load_stage(model, 0, layers, capacity=CONTEXT + max(ROWS), **FORMATS[form])
    rows = {str(number): whole_step(stage, number) for number in ROWS}
    profile = {str(number): parts(stage, number) for number in PROFILED}
    del stage
    own = {**FORMATS[form], "threads": threads, "max_num_seqs": max(REQUESTS)}
    engines = [decoded(model, stages, number, TOKENS, own) for stages in STAGES for number in REQUESTS]
    return {"threads": count, "rows": rows, "parts": profile, "engines": engines}


def report(form: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"{form}, {found['threads']} thread(s); a step by rows: " + ", ".join(
        f"{rows} {ms:.2f} ms ({ms / found['rows']['1']:.2f}x)" for rows, ms in found["rows"].items()
    )
    for rows, by_part in found["parts"].items():
        yield f"{rows:>2} rows: " + ", ".join(f"{part} {ms:.2f} ms" for part, ms in by_part.items())
    for one in found["engines"]:
        yield (
            f"{one['stages']} stage(s) of {one['threads']} thread(s), {one['requests']:2} request(s): "
            f"{one['tokens_per_second']:.1f} tokens/s, {one['step_ms']:.2f} ms from result to result, "
            f"{one['computed_ms']:.2f} computed"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs.step")
    parser.add_argument("--model", required=True, help="a checkpoint's folder, or a GGUF file")
    parser.add_argument("--threads", type=int, help="of each stage; default: the host's cores, shared among them")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--store", action="store_true", help="keep the figures for the pages of results")
    asked = parser.parse_args(arguments)
    for form in asked.formats:
        found = measured(os.path.expanduser(asked.model), form, asked.threads)
        for line in report(form, found):
            print(line, flush=True)
        if asked.store:
            store(NAME, HOW, ([COMMAND.format(found["threads"])], kept_figures(NAME) | {form: found}))


if __name__ == "__main__":
    main()
