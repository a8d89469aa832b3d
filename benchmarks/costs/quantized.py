"""Cost and loss of each weight format: time of a step by rows, size, perplexity. One stage on one thread.

    python -m benchmarks.costs.quantized MODEL.gguf PROMPTS.jsonl ...

All steps are interleaved, and the medians are stored. Perplexity is of the prompts' first ``TOKENS`` tokens each.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.formats import FORMATS
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.lab.grid import read_prompts
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.visibility import BatchView, RequestView
from penstock.text.tokenizer import load_tokenizer

NAME: Final = "quantized"
HOW: Final = "Measured, one stage with one thread, in that thread's own time"
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 200)
"""Drafted tokens; and a prompt's, which are as many as a piece has."""
CONTEXT, TOKENS, PROMPTS, TURNS = 64, 512, 6, 7


def load(model: str, name: str) -> StageModel:
    return load_stage(model, 0, open_checkpoint(model).num_layers, capacity=TOKENS, **FORMATS[name])


def view_of(tokens: Sequence[int], seen: int = 0) -> BatchView:
    """A chain of rows of one request, the first ``seen`` of which have been computed already."""
    slots = np.arange(len(tokens))
    new = slots[seen:]
    request = RequestView(0, new - seen, slots, slots, np.tril(np.ones((len(tokens),) * 2, dtype=bool))[seen:])
    return BatchView(new * 0, new, new, new, np.array(tokens)[seen:], [request], new - 1)


def step_ms(stage: StageModel, rows: int) -> float:
    """Milliseconds of rows after a context, from their tokens to their logits."""
    view = view_of([1] * (CONTEXT + rows), CONTEXT)
    start = time.thread_time()
    stage.logits(stage.forward(view, None), range(rows))
    return 1e3 * (time.thread_time() - start)


def perplexity(stage: StageModel, texts: Sequence[Sequence[int]]) -> float:
    loss = 0.0
    for text in texts:
        logits_NV = stage.logits(stage.forward(view_of(text), None), range(len(text) - 1))
        loss += torch.nn.functional.cross_entropy(logits_NV, torch.tensor(text[1:]), reduction="sum").item()
    return math.exp(loss / sum(len(text) - 1 for text in texts))


def texts_of(model: str, files: Sequence[str]) -> Iterator[list[int]]:
    tokenizer = load_tokenizer(open_checkpoint(model).path)
    for file in files:
        for prompt in read_prompts(Path(file), PROMPTS):
            yield list(tokenizer.encode(prompt))[:TOKENS]


def measured(model: str, files: Sequence[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    stages = {name: load(model, name) for name in FORMATS}
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(TURNS):
        for rows in ROWS:
            for name, stage in stages.items():
                taken.setdefault((name, rows), []).append(step_ms(stage, rows))
    texts = list(texts_of(model, files))
    return {
        "file_bytes": Path(model).stat().st_size,
        "tokens": sum(len(text) - 1 for text in texts),
        "formats": {
            name: {
                "step_ms": {str(rows): median(taken[name, rows]) for rows in ROWS},
                "weight_bytes": stage.weight_bytes,
                "perplexity": perplexity(stage, texts),
            }
            for name, stage in stages.items()
        },
    }


if __name__ == "__main__":
    model, *files = sys.argv[1:]
    figures = measured(model, files)
    Benchmark(__file__, HOW).keep(figures, " ".join(Path(file).name for file in (model, *files)))
    show(figures)
