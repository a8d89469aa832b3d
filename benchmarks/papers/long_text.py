"""PipeDec's Figure 3 on a text of 30,000 tokens: how often the draft model's best k candidates hold the target's token.

    python -m benchmarks.papers.long_text

The demo pair on one file that neither has been trained on: transformers' generation/utils.py. Both read the same text,
and the reference is the target's greedy token after each of its tokens. Long: windows of 512 tokens, as long as the
sequences that both were trained on, of which the second half counts (in the first window all of it). Short: the same
tokens in texts of 80, each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import utils

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.virtual import DRAFT, TARGET

NAME, HOW = "long_text", "Computed with the demo pair"
TOKENS, SHORT = 30_000, 80
"""Tokens of the paper's long text and of its short one."""
CONTEXT: Final = 512
"""The longest sequences that the demo pair was trained on."""
CANDIDATES: Final = (1, 2, 4, 8, 16)


def windows(length: int) -> Iterator[tuple[int, int, int]]:
    """Start and end of each window, and where it begins to count, so that every token counts once."""
    step = CONTEXT // 2
    for start in range(0, max(1, length - step), step):
        yield start, min(start + CONTEXT, length), start if start == 0 else start + step


def ranks(models: tuple[Any, Any], ids: Tensor) -> Tensor:
    """[tokens]: the rank of the target's best token among the draft model's, 0 the best, after each token."""
    target, draft = (model(ids[None]).logits[0].float() for model in models)
    best = target.argmax(-1, keepdim=True)
    return (draft > draft.gather(-1, best)).sum(-1)


def shares(found: Tensor) -> dict[str, float]:
    return {str(k): round(float((found < k).double().mean()), 4) for k in CANDIDATES}


@torch.inference_mode()
def measured() -> dict[str, Any]:
    models = tuple(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (TARGET, DRAFT))
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = Path(utils.__file__).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[0, :TOKENS]
    pair = (models[0], models[1])
    long = [ranks(pair, ids[start:end])[counts - start :] for start, end, counts in windows(len(ids))]
    short = [ranks(pair, part) for part in ids.split(SHORT)]
    return {"tokens": len(ids), "long": shares(torch.cat(long)), "short": shares(torch.cat(short))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    figures = measured()
    Benchmark(__file__, HOW).keep(figures)
    show(figures)
