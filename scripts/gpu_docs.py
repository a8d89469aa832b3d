"""Write docs/reference/gpus.md: what a stage does on a GPU, what was measured on one, and what a CPU could check.

python -m scripts.gpu_docs
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from benchmarks.gpu.summary import counted
from benchmarks.strategies.families import ALL
from penstock.lab.report import markdown
from penstock.models.attention import LEAST_SPLIT
from penstock.models.graphs import MOST_ROWS, USUAL_SLOTS
from tests.checkpoints import settings_of
from tests.fake_gpu import outcomes

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "gpus.md"
MEASURED: Final = Path(__file__).parent.parent / "benchmarks" / "measured" / "machines" / "h200"
PARTS: Final = ("facts", "start", "right", "families", "steps", "prefill", "many", "pipeline")
ROWS: Final = ("1", "8", "64")
STEPS_HEAD: Final = ("model, bfloat16", "tokens before", "1 row: eager, graph", "8 rows", "64 rows", "bound")
PIPELINE_HEAD: Final = ("stages, transport", "tokens/s, eager", "tokens/s", "ms a hop", "ms of the engine a step")
WHOLE: Final = {True: "floats, int8, int4", False: "floats"}
HEAD: Final = """\
# GPUs

`--device cuda` has each stage compute on a GPU, with PyTorch's own operations. One kind of GPU has run it, an NVIDIA
H200: the figures are below. ROCm, consumer cards, several GPUs and Jetsons have not. This page says how a stage is made
to fit a GPU, and what a CPU could check of it. `python -m scripts.gpu_docs` writes it; change that, not this.

## Steps as graphs

A GPU computes a layer of a few rows sooner than Python and the driver launch its 27 to 90 kernels one by one. A stage
therefore records a step of up to {most_rows} rows once, as a CUDA graph, and launches that for later batches. A graph
fixes shapes, so that rows are padded to a power of two, and so are the slots that they see; a mask says which row sees
which slot, also where the rows are of several requests. The padding repeats the last row, and nobody reads what comes
of it. The graphs for texts of up to {usual} tokens are recorded as a stage starts, those for longer ones with the
second batch of a size; each takes about 0.1 s, and all share their memory.

Layers that keep a state (Qwen3-Next, LFM2, Bamba and their like) are computed without graphs, and so is everything from
the first step on that a driver cannot record, with a line in the log. Prompts are computed in pieces without graphs.

In bfloat16 and float16, attention over {least_split} slots and more is computed in parts, side by side, whose outputs
are added by their weights, as in Flash-Decoding. Where no other processor of logits is at work, a pick at a temperature
leaves the GPU as the few tokens that the position's noise can lift to the top; the token is decided among them in
float64 as on a CPU, and is the same.

## Measured on an H200

{device}, driver {driver}, PyTorch {measured_torch}, transformers {measured_transformers}; it reads memory at
{read:.0f} GB/s. Weights are drawn, and of the model's real shapes (`python -m benchmarks.gpu`; files in
`benchmarks/measured/machines/h200/`). *Eager* is the code without graphs, on a machine of the same kind an hour before.
The bound is the bytes of the weights at that bandwidth.

Milliseconds of a whole step, its greedy picks included:

{steps}

Behind 8,192 tokens, attention was still computed in one piece: the arenas had 8,256 slots, which parts of 512 do not
divide. Since then parts are made as long as such a number allows.

With `--quantization int4` a step of one row of Llama-3.1-8B takes {int4:.0f} ms, {int4_times:.0f} times as long as in
bfloat16.

Plain decoding of Qwen3-0.6B by an engine whose stages are processes, all of them on the one GPU, so that several only
show what a hop costs:

{pipeline}

Every engine gave the same tokens. Llama-3.1-8B: {eight:.0f} tokens/s over one stage. A prompt of 4,096 tokens enters
in {prompt:.2f} s.

Right tokens: {families} families (`families.json`), each a small random checkpoint over two stages, with greedy and
sampled answers to a short and a long prompt. In float32 {like_cpu} answers are those of the processor, and {float32}
of FlowSpec's are those of plain decoding; in bfloat16 {bfloat16}, in float16 {float16}, with int8 {int8} and with int4
{int4_same}, where texts differ at near ties. Llama's with all strategies, and a drafter that is sometimes wrong:
{strategies} answers in float32 and bfloat16 together. The other families, the pair's drafters and a stage that is
killed have not been tried on a GPU.

Not measured there: several GPUs, memory as predicted and as taken by a large model (the demo's two stages took
{loaded:.2f} GB, of which the driver's own contexts are most, where {predicted:.2f} were predicted for weights and
keys), and picks at a temperature from a trained model: drawn weights give flat logits, of which all tokens are needed
({pick:.0f} ms for 8 rows of 128,256).

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

They are the file's own numbers, rounded once to the dtype, as with `none`. A weight has torch's operations move about
25 bytes, where floats in 16 bits take 2, and the step above takes {int4_times:.0f} times as long; with hundreds of
rows, as of a prompt, the products come to outweigh that. So: `int4` where a model does not fit otherwise, `none` with
`--dtype auto` where it does. The log says at the start how much that would take. Learned drafters and experts are
floats.

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
product that torch has from there on went into graphs on the H200, so that it waits for nothing.
The table has the copies *to* the device that the 8 rows take: tokens, positions, slots and masks, which all layers of
a kind share, and what layers with a state need beside.

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
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    return HEAD.format(**versions, **measured()) + "".join(rows)


def measured() -> dict[str, Any]:
    """The figures of the page, from benchmarks/measured."""
    found = {part: figures(f"gpu/{part}") for part in PARTS}
    eager = {part: figures(f"gpu-eager/{part}") for part in ("steps", "pipeline")}
    facts, steps, start = found["facts"], found["steps"], found["start"]["demo, cuda"]
    versions = stored("gpu/facts")["versions"]
    one_row = {form: steps[f"Llama-3.1-8B, {form}"]["step_ms"]["0"]["1"] for form in ("bfloat16", "int4")}
    families = found["families"].values()
    right = [one["synthetic"] for form, one in found["right"]["llama"].items() if form != "like_cpu"]
    return {
        "most_rows": MOST_ROWS,
        "usual": f"{USUAL_SLOTS:,}",
        "least_split": f"{LEAST_SPLIT:,}",
        "device": facts["device"]["name"],
        "driver": facts["driver"]["driver_version"][0],
        "measured_torch": versions["torch"],
        "measured_transformers": versions["transformers"],
        "read": facts["read_gb_s"],
        "steps": markdown(STEPS_HEAD, list(steps_rows(steps, eager["steps"]))),
        "int4": one_row["int4"],
        "int4_times": one_row["int4"] / one_row["bfloat16"],
        "pipeline": markdown(PIPELINE_HEAD, list(pipeline_rows(found["pipeline"], eager["pipeline"]))),
        "eight": found["many"]["1 request"]["tokens_per_second"],
        "prompt": found["prefill"]["pieces of 2048"]["seconds"],
        "families": len(families),
        **{form: counted(one[form] for one in families) for form in ("like_cpu", "float32", "bfloat16", "float16")},
        **{name: counted(one[form] for one in families) for name, form in (("int8", "int8"), ("int4_same", "int4"))},
        "strategies": counted(count for one in right for count in one.values()),
        "loaded": start["loaded_bytes"] / 1e9,
        "predicted": start["predicted_bytes"] / 1e9,
        "pick": found["prefill"]["pick_ms"]["T = 1"],
    }


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = stored(name)["figures"]
    return found


def steps_rows(steps: Mapping[str, Any], eager: Mapping[str, Any]) -> Iterator[list[str]]:
    for model in ("Qwen3-0.6B", "Llama-3.1-8B"):
        for context in ("0", "2048", "8192"):
            own, before = (one[f"{model}, bfloat16"] for one in (steps, eager))
            pairs = [(before["step_ms"][context][rows], own["step_ms"][context][rows]) for rows in ROWS]
            cells = [f"{old:.1f}, {new:.1f}" for old, new in pairs]
            yield [model, f"{int(context):,}", *cells, f"{own['bound_ms']:.2f}"]


def pipeline_rows(found: Mapping[str, Any], eager: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, one in found.items():
        if isinstance(one, Mapping):
            before = f"{eager[name]['tokens_per_second']:.0f}" if name in eager else "-"
            yield [name, before, f"{one['tokens_per_second']:.0f}", f"{one['hop_ms']:.2f}", f"{one['loop_ms']:.2f}"]


def family_of(name: str) -> str:
    return str(settings_of(name)["model_type"])


def row(copies: int, whole: bool, families: Iterable[str]) -> str:
    return f"| {copies} | {WHOLE[whole]} | {', '.join(f'`{name}`' for name in sorted(families))} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(outcomes(ALL)), encoding="utf-8")
