"""The memory that a stage holds beside its weights, and the most it held while it loaded them.

    python -m benchmarks.costs.stage_memory MODEL [--stages 1,2,4] [--dtype float32] [--quantization none]

MODEL is a folder or a GGUF file. Each stage loads in a fresh process that has imported everything before. Memory is the
process's resident set, less its size before loading and less the KV cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from typing import Any, Final

MIB: Final = 1 << 20
CAPACITY: Final = 1024


def memory() -> dict[str, int]:
    """Bytes of this process: resident now, and at most so far (Linux)."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


def load(model: str, first: int, last: int, dtype: str, quantization: str) -> dict[str, int]:
    """Bytes of weights, and of memory after loading and at most, measured in a process of its own."""
    import torch

    from penstock.checkpoint.architectures import model_class
    from penstock.checkpoint.checkpoint import open_checkpoint
    from penstock.models.stage_model import load_stage
    from penstock.pipeline.worker import returned_at_once

    torch.set_num_threads(1)
    model_class(open_checkpoint(model).config)  # imports the architecture's module
    before = memory()["VmRSS:"]
    with returned_at_once():
        stage = load_stage(
            model,
            first,
            last,
            capacity=CAPACITY,
            dtype=dtype,
            quantization=quantization,
            max_model_len=CAPACITY,
        )
    after = {name: size - before - stage.kv_bytes for name, size in memory().items()}
    return {"weights": stage.weight_bytes, "resident": after["VmRSS:"], "peak": after["VmHWM:"]}


def splits(model: str, stages: int) -> list[tuple[int, int]]:
    from penstock.checkpoint.checkpoint import open_checkpoint

    return open_checkpoint(model).even_split(stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(f"{given.model}: {sum(sizes(given.model)) / MIB:.0f} MiB; {given.dtype}, {given.quantization}, in MiB")
    print(f"{'stages':>6} {'layers':>8} {'weights':>8} {'resident':>8} {'peak':>8}")
    for stages in map(int, given.stages.split(",")):
        for first, last in splits(given.model, stages):
            with context.Pool(1) as pool:
                found: dict[str, Any] = pool.apply(load, (given.model, first, last, given.dtype, given.quantization))
            figures = " ".join(f"{found[name] / MIB:8.0f}" for name in ("weights", "resident", "peak"))
            print(f"{stages:6} {f'{first}-{last}':>8} {figures}", flush=True)


def sizes(model: str) -> list[int]:
    from penstock.checkpoint.checkpoint import open_checkpoint

    return [file.stat().st_size for file in open_checkpoint(model).weights.files]


if __name__ == "__main__":
    main()
