"""Write docs/reference/gpus.md: what a stage does on a GPU, and what was checked of that without one.

python -m scripts.gpu_docs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from benchmarks.strategies.families import ALL
from tests.checkpoints import settings_of
from tests.fake_gpu import outcomes

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "gpus.md"
WHOLE: Final = {True: "floats, int8, int4", False: "floats"}
HEAD: Final = """\
# GPUs

`--device cuda` has each stage compute on a GPU, with PyTorch's own operations. **No GPU has run this yet.** This page
says how a stage is made to fit one, and what a CPU could check of it. `python -m scripts.gpu_docs` writes it; change
that, not this.

## Memory

A stage reads its layers in the CPU's memory: those that its file has in the wanted format stay mapped to it and take
none. There layers are compared with transformers' own, joined and packed, and each is moved to the GPU before the
next one's weights are copied, so that the GPU never holds more than the weights. What does not fit is refused before
anything is loaded, as far as the driver tells how much is free, or else by a line that names `device`.

A batch for which a GPU's memory does not suffice is computed again in halves, down to single rows, and so are its
picks. The rows' results are the same: what a failed attempt has stored in their slots is overwritten. A stage ends
only if one row does not fit. The memory of a stage that has ended is free, since every stage is a process of its own.

## Formats

`--dtype auto` has 16 bits on GPUs: bfloat16, or float16 where a driver tells of a compute capability below 8.0, with
a warning. In 16 bits attention is torch's `scaled_dot_product_attention`, which keeps scores in float32; layers with
a soft cap (Gemma 2) or sinks (gpt-oss) have plain products instead, which round scores to the format, for 2 to 10
times the error.

## Weights in whole numbers

`--quantization int8` and `int4` hold linear layers as whole numbers, and so does `auto` where the file has them: 4
bits, or 8, and a scale for 32 weights, with a minimum in `int4`. Embedding and head have 8 bits. There is no kernel
for products of these yet: at every step a layer's weights become floats, at most 16 million at a time, and are
multiplied as such.

They are the file's own numbers, rounded once to the dtype, as with `none`. Reckoned by the bytes that torch's
operations move, about 25 for a weight where floats in 16 bits take 2, a step of one row takes about ten times as long
as with `none` in bfloat16; with hundreds of rows, as of a prompt, the products come to outweigh that. So: `int4`
where a model does not fit otherwise, `none` with `--dtype auto` where it does. The log says at the start how much
that would take. Learned drafters and experts are floats.

## Families on a device without numbers

Small random checkpoints of every family that [runs](families.md) have been computed on a device that only Python
knows: PyTorch {torch}'s backend in Python, under its `FakeTensorMode`, with transformers {transformers}. Tensors
there have shapes and no numbers. An operation on tensors of two devices raises an error, as on a GPU, and so does a
number that the host reads amid a batch, for which a GPU would stop (`.item()`, `.tolist()`, `if tensor:`). Copies
from the device are counted, and have to be none until tokens are picked. Each checkpoint went through cut in two and
whole, in float32 and bfloat16, and with weights of 4 bits where all of them are in linear layers: a prompt of 70
tokens; then 8 rows of two requests, a tree among them, with slots far apart. `python -m tests.fake_gpu NAME` does it.

The test says nothing of numbers and speed, nor of what torch's own kernels wait for. One wait is known: below compute
capability 8.0 transformers' product of experts reads on the host how many rows each expert has, in every layer; the
product that torch has from there on was not looked into. The table has the copies *to* the device that the 8 rows
take: tokens, positions, slots and masks, which all layers of a kind share, and what layers with a state need beside.

| copies to the device | weights | families |
| --- | --- | --- |
"""


def page(found: Iterable[Mapping[str, Any]]) -> str:
    """The whole of docs/reference/gpus.md. Raises ValueError if a family did not go through."""
    families: dict[tuple[int, bool], set[str]] = {}
    for one in found:
        if "error" in one:
            raise ValueError(f"{one['name']}: {one['error']} at {one['at']}")
        families.setdefault((one["copies"], one["whole_numbers"]), set()).add(family_of(one["name"]))
    rows = (row(copies, whole, families[copies, whole]) for copies, whole in sorted(families))
    return HEAD.format(torch=torch.__version__.partition("+")[0], transformers=transformers.__version__) + "".join(rows)


def family_of(name: str) -> str:
    return str(settings_of(name)["model_type"])


def row(copies: int, whole: bool, families: Iterable[str]) -> str:
    return f"| {copies} | {WHOLE[whole]} | {', '.join(f'`{name}`' for name in sorted(families))} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(outcomes(ALL)), encoding="utf-8")
