"""What formats of weights cost and lose."""

from __future__ import annotations

from typing import Any

from benchmarks.costs import quantized
from benchmarks.sections.base import Section, paragraphs
from penstock.bench.formats import markdown


def render_quantized(figures: Any) -> str:
    formats = figures["formats"]
    rows = list(next(iter(formats.values()))["step_ms"])
    steps = [[f"`{name}`", *(f"{one['step_ms'][n]:.1f}" for n in rows)] for name, one in formats.items()]
    kept = [
        [
            f"`{name}`",
            *(f"{one['step_ms'][n] / one['step_ms']['1']:.2f}" for n in ("4", "8", "16")),
            f"{one['weight_bytes'] / 1e6:.0f} MB, {one['weight_bytes'] / figures['file_bytes']:.2f}",
            f"{one['perplexity']:.3f}",
        ]
        for name, one in formats.items()
    ]
    return paragraphs(
        "SmolLM2-135M-Instruct from its Q4_1 GGUF file, all layers, embedding and head on one stage. The first table "
        f"has the milliseconds of a step by rows, behind {quantized.CONTEXT} tokens: the time of so many drafted "
        "tokens, logits of all of them included.",
        markdown(["rows", *rows], steps),
        "Then what 4, 8 and 16 rows take, one row taking 1; what the weights take in memory, and beside the file; and "
        f"the perplexity of {figures['tokens']:,} tokens of prompts. "
        "[quantization.md](../../reference/quantization.md) says what int8 is.",
        markdown(["", "4", "8", "16", "weights, of the file", "perplexity"], kept),
    )


SECTIONS = (
    Section(name=quantized.NAME, title="Formats of weights", how=quantized.HOW, take=None, render=render_quantized),
)
