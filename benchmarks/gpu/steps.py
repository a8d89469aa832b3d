"""The parts ``steps``, ``kernels`` and ``prefill``: one stage with a whole model in this process, and its batches."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.devices import WARM_UP, empty, is_gpu, read_bandwidth, seconds_of, synchronize
from benchmarks.gpu.drawn import drawn_model, main_model
from benchmarks.gpu.sizes import Sizes, sizes_of
from benchmarks.shared.timed_parts import Findings
from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.messages import Sampling
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.visibility import BatchView, view_of

DTYPE: Final = "bfloat16"
FORMATS: Final = {"none": None, "int4": 2}
"""Formats of the weights, and how many of the contexts are measured with each; None: all."""
PROFILED: Final = (1, 8)
"""Numbers of rows whose step is looked at kernel by kernel."""
MOST_KERNELS: Final = 8
PICKED: Final = 8
"""Rows for which tokens are picked."""
SAMPLINGS: Final = {
    "T = 0": Sampling(),
    "T = 0.1": Sampling(temperature=0.1, seed=1),  # drawn weights' logits are then as far apart as a trained model's
    "T = 1": Sampling(temperature=1.0, seed=1),
    "T = 1, top-p 0.9": Sampling(temperature=1.0, seed=1, top_p=0.9),
}
TOKEN: Final = 7
"""The token of every row: which one it is changes no dense model's time."""


def measure(options: argparse.Namespace, findings: Findings) -> None:
    """Steps of every model in every format, by rows and by the tokens before them."""
    sizes, device = sizes_of(options), options.device
    bandwidth = read_bandwidth(device, sizes.read_bytes, sizes.repeats)
    findings.add("read_gb_s", bandwidth / 1e9)
    for name in sizes.models:
        with findings.trying(name), drawn_model(name, options, sizes, findings) as folder:
            for form, contexts in FORMATS.items():
                label = f"{name}, {DTYPE if form == 'none' else form}"
                with findings.trying(label), whole_model(folder, device, form, sizes) as stage:
                    steps(stage, label, replace(sizes, contexts=sizes.contexts[:contexts]), bandwidth, findings)


@contextmanager
def whole_model(folder: str, device: str, quantization: str, sizes: Sizes) -> Iterator[StageModel]:
    """One stage with all layers, and slots for the longest text. Its memory is free again after the block."""
    # No slot is checked below a stage's core: one beyond the capacity would be written where other memory is.
    longest = max(max(sizes.contexts) + max(*sizes.rows, *PROFILED), PICKED, sizes.prompt)
    layers = open_checkpoint(folder).num_layers
    stage = load_stage(
        folder,
        0,
        layers,
        capacity=longest,
        dtype=DTYPE,
        device=device,
        quantization=quantization,
        max_model_len=longest,
    )
    try:
        yield stage
    finally:
        del stage
        gc.collect()
        empty(device)


def steps(stage: StageModel, label: str, sizes: Sizes, bandwidth: float, findings: Findings) -> None:
    """Add the milliseconds of a step by context and rows, the token picked after every row included."""
    device, read = str(stage.device), read_bytes(stage)
    found: dict[str, Any] = {"weight_bytes": stage.weight_bytes, "bound_ms": 1e3 * read / bandwidth, "step_ms": {}}
    findings.add(label, found)
    for context in sizes.contexts:
        by_rows = found["step_ms"].setdefault(str(context), {})
        for rows in sizes.rows:
            view = rows_behind(context, rows)
            by_rows[str(rows)] = 1e3 * seconds_of(partial(step, stage, view), device, sizes.repeats)
            findings.add(label, found)
    found["share_of_bound"] = found["bound_ms"] / found["step_ms"][str(sizes.contexts[0])]["1"]
    findings.add(label, found)


def read_bytes(stage: StageModel) -> int:
    """Bytes of the weights that a step reads: all but an embedding of its own, of which it reads some rows."""
    config = stage.checkpoint.config
    embedding = config.vocab_size * config.hidden_size * torch.finfo(getattr(torch, stage.dtype)).bits // 8
    return stage.weight_bytes - (0 if config.tie_word_embeddings else embedding)


def rows_behind(context: int, rows: int) -> BatchView:
    """A chain of rows of one request behind so many committed tokens."""
    return view_of([TOKEN] * (context + rows), range(context, context + rows))


def step(stage: StageModel, view: BatchView) -> None:
    wanted = range(len(view.tokens))
    stage.pick(view, stage.forward(view, None), wanted, [Sampling()] * len(wanted))


def kernels(options: argparse.Namespace, findings: Findings) -> None:
    """A step's kernels, by rows. A profiler slows what comes after it down, hence a part of its own."""
    sizes = sizes_of(options)
    name = main_model(options, sizes)
    findings.add("model", name)
    with (
        drawn_model(name, options, sizes, findings) as folder,
        whole_model(folder, options.device, "none", sizes) as stage,
    ):
        for rows in PROFILED:
            label = "1 row" if rows == 1 else f"{rows} rows"
            with findings.trying(label):
                findings.add(label, kernels_of(stage, rows_behind(sizes.contexts[-1], rows)))


def kernels_of(stage: StageModel, view: BatchView) -> dict[str, Any]:
    """How many kernels a step launches, how long they run, and those that take longest.

    On a processor torch's operators stand in for kernels; those within compiled layers cannot be seen.
    """
    gpu, device = is_gpu(str(stage.device)), str(stage.device)
    for _ in range(WARM_UP + 1):  # so that nothing is chosen, compiled or recorded in the one that counts
        step(stage, view)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as found:
        step(stage, view)
        synchronize(device)
    by_name: dict[str, list[float]] = {}
    for event in found.events():
        if gpu and event.device_type == DeviceType.CUDA:
            by_name.setdefault(event.name, []).append(event.self_device_time_total / 1e3)
        elif not gpu and event.name.startswith("aten::"):
            by_name.setdefault(event.name, []).append(event.self_cpu_time_total / 1e3)
    longest = sorted(by_name.items(), key=lambda one: -sum(one[1]))[:MOST_KERNELS]
    return {
        "launches": sum(map(len, by_name.values())),
        "busy_ms": sum(map(sum, by_name.values())),
        "longest": [{"name": name[:80], "count": len(taken), "ms": sum(taken)} for name, taken in longest],
    }


# ------------------------------------------------------------------------------------- prompts, picks, the first token


def prefill(options: argparse.Namespace, findings: Findings) -> None:
    """Tokens per second of a long prompt by the size of its pieces, milliseconds of a pick, and the first token."""
    sizes = sizes_of(options)
    name = main_model(options, sizes)
    findings.add("model", name)
    with drawn_model(name, options, sizes, findings) as folder:
        with findings.trying("prompt and picks"), whole_model(folder, options.device, "none", sizes) as stage:
            for piece in sizes.pieces:
                with findings.trying(f"pieces of {piece}"):
                    findings.add(f"pieces of {piece}", prompt_of(stage, piece, sizes))
            findings.add("pick_ms", picks(stage, sizes))
        with findings.trying("first token"):
            findings.add("first_token", first_token(folder, options.device, sizes))


def prompt_of(stage: StageModel, piece: int, sizes: Sizes) -> dict[str, float]:
    """Seconds of a whole prompt in pieces, and its tokens per second."""
    views = [rows_behind(first, min(piece, sizes.prompt - first)) for first in range(0, sizes.prompt, piece)]
    repeats = 1 + sizes.repeats // 4
    seconds = seconds_of(lambda: [stage.forward(view, None) for view in views], str(stage.device), repeats)
    return {"tokens": sizes.prompt, "seconds": seconds, "tokens_per_second": sizes.prompt / seconds}


def picks(stage: StageModel, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of the head for so many rows, and of the tokens picked from its logits."""
    device, view, wanted = str(stage.device), rows_behind(0, PICKED), range(PICKED)
    hidden = stage.forward(view, None)
    head = seconds_of(lambda: stage.logits(hidden, wanted), device, sizes.repeats)
    found = {"rows": PICKED, "head": 1e3 * head}
    for name, sampling in SAMPLINGS.items():
        run = lambda sampling=sampling: stage.pick(view, hidden, wanted, [sampling] * PICKED)  # noqa: E731
        found[name] = 1e3 * (seconds_of(run, device, sizes.repeats) - head)
    return found


def first_token(folder: str, device: str, sizes: Sizes) -> dict[str, float | None]:
    """Seconds from nothing to an engine, whose weights are in the page cache, and from a prompt to its first token."""
    prompt = {"prompt_token_ids": [TOKEN] * min(64, sizes.prompt)}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    begun = time.monotonic()
    with LLM(folder, skip_tokenizer_init=True, dtype=DTYPE, device=device, speculative_config=None) as llm:
        started = time.monotonic() - begun
        first, again = (llm.generate([prompt], params)[0].outputs[0].first_token_seconds for _ in range(2))
    return {"start_s": started, "first_token_s": first, "first_token_again_s": again}
