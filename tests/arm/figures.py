"""Numbers that a processor computes, by name, for comparison with those that another one computes from the same files.

python -m tests.arm.figures CHECKPOINT GGUF OUT.npz [PART ..]

It runs without pytest, since it is also run where every instruction is emulated. Inputs come from uniform whole
numbers and from files: torch's random numbers are others on other processors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from penstock.checkpoint.gguf_blocks import floats
from penstock.checkpoint.gguf_header import read_header
from penstock.engine.options import DEMO
from penstock.messages import Sampling
from penstock.models.compiled.cache import INT4, INT8
from penstock.models.compiled.dot import GROUP, LANES, instruction
from penstock.models.compiled.float_blocks import FORMS
from penstock.models.compiled.products import Weights, product
from penstock.models.linear import FloatHead
from penstock.noise import generate, to_gumbel
from penstock.stage.sampler import distribution, log_softmax
from penstock.text.tokenizer import load_tokenizer
from tests.engines import InProcessEngine
from tests.exactness import CODE, strategies, tokens_of
from tests.unit.models.compiled.digests import logits
from tests.unit.models.compiled.formats import FORMATS

Figures = Iterator[tuple[str, np.ndarray]]
ROWS: Final = 15
"""Eight, four, two and one together, or pairs."""
INPUTS, OUTPUTS = 4 * GROUP, 3 * LANES
VOCABULARY: Final = 5000
STAGES: Final = 3
TOKENS: Final = 8
SAMPLINGS: Final = (Sampling(), Sampling(seed=3, temperature=0.6, top_p=0.9, top_k=80))
ENGINES: Final = ({"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "int4"})
SMALL: Final = 2.0**-130
"""A number that bfloat16 has and its sums take for zero."""


def whole_products() -> Figures:
    """Products with weights of whole numbers: random ones, and the largest."""
    for form, name in ((INT4, "int4"), (INT8, "int8")):
        for extreme in (False, True):
            random = np.random.default_rng(form)
            size = OUTPUTS * INPUTS * form // 8
            largest = np.array([0x00, 0xFF] if form == INT4 else [0x7F, 0x81])
            values = random.choice(largest, size) if extreme else random.integers(0, 256, size)
            if form == INT8:
                values[values == 0x80] = 0x7F
            kinds = 2 if form == INT4 else 1
            scales = random.uniform(-2, 2, OUTPUTS * INPUTS // GROUP * kinds).astype(np.float16).view(np.uint16)
            weights = Weights(values.astype(np.uint8), scales, form, 0, INPUTS, OUTPUTS)
            rows = random.uniform(-3, 3, (ROWS, INPUTS)).astype(np.float32)
            out = np.empty((ROWS, OUTPUTS), np.float32)
            product(np.sign(rows) if extreme else rows, weights, out)
            yield f"{name}{'-largest' if extreme else ''}", out


def float_products() -> Figures:
    random = np.random.default_rng(1)
    weight = random.uniform(-1, 1, (OUTPUTS, 77)).astype(np.float32)
    rows = random.uniform(-3, 3, (ROWS, 77)).astype(np.float32)
    for dtype in FORMS:
        name = str(dtype).removeprefix("torch.")
        linear = nn.Linear(77, OUTPUTS, bias=False)
        linear.weight = nn.Parameter(torch.from_numpy(weight).to(dtype), requires_grad=False)
        yield name, FloatHead(linear)(torch.from_numpy(rows)).numpy()
        linear = nn.Linear(8, LANES, bias=False)
        linear.weight = nn.Parameter(torch.ones(LANES, 8, dtype=dtype), requires_grad=False)
        yield f"{name}-small", FloatHead(linear)(torch.full((1, 8), SMALL)).numpy()


def layers(checkpoint: Path) -> Figures:
    """Logits of a model of compiled layers, in every format."""
    for name, options in FORMATS.items():
        yield name, logits(checkpoint, options).numpy()


def gguf_tensors(file: Path) -> Figures:
    """Every tensor of a file, as floats."""
    for name, info in read_header(file).tensors.items():
        yield name, floats(info).float().numpy()


def sampler() -> Figures:
    scores = np.random.default_rng(2).uniform(-9, 9, VOCABULARY)
    for position in (0, 7, 2**40):
        raw = generate(11, 1, position, VOCABULARY)
        yield f"draws-{position}", raw
        yield f"noise-{position}", to_gumbel(raw)
    yield "logprobs", log_softmax(scores)
    for temperature in (0.6, 1.0, 1.7):
        sampling = Sampling(temperature=temperature, top_p=0.95, top_k=400)
        yield f"chances-{temperature}", distribution(scores, sampling, 0)


def engine() -> Figures:
    """Token ids of the embedded target after every strategy, drafted for by the embedded draft model."""
    prompt = load_tokenizer(DEMO / "target").encode(CODE)
    for options in ENGINES:
        run = InProcessEngine(DEMO / "target", STAGES, DEMO / "draft", slots=512, **options)
        for number, strategy in enumerate(strategies(STAGES)):
            for sampling in SAMPLINGS:
                request = run.submit(prompt, sampling, TOKENS, strategy)
                run.run()
                found = np.array(tokens_of(request))
                yield f"{'-'.join(options.values())}-{number}-{sampling.temperature}", found


def figures(checkpoint: Path, file: Path, parts: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The figures of these parts, by default of all; a name begins with the part that it belongs to."""
    makers = {
        "whole": whole_products,
        "floats": float_products,
        "sampler": sampler,
        "gguf": lambda: gguf_tensors(file),
        "layers": lambda: layers(checkpoint),
        "engine": engine,
    }
    return {f"{part}/{name}": value for part in parts or makers for name, value in makers[part]()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoint, file, out, *parts = sys.argv[1:]
    np.savez(out, kind=np.array(instruction()), **figures(Path(checkpoint), Path(file), parts))
