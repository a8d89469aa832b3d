"""The part ``families``: a small random checkpoint of every family on the device, in every format that it can have.

Several processes share the families and the device, each with engines as in the part ``right``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING

from benchmarks.gpu.right import CALM, LONGEST, SHORTEST, STAGES, Asked, count_same, ids_of, like_cpu
from benchmarks.gpu.sizes import sizes_of
from benchmarks.shared.timed_parts import DoesNotFit, Findings
from benchmarks.strategies.families import ALL
from penstock.core import ConfigError
from penstock.drafters.merged import NgramDrafter
from penstock.files import FAST
from penstock.hosts.facts import usable_cores
from tests.checkpoints import make_checkpoint, settings_of
from tests.engines import InProcessEngine
from tests.exactness import PLAIN, TEXT, strategies

FORMATS: Final = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
PROCESSES: Final = 12
"""Most processes: each takes half a gigabyte of a GPU's memory before its first tensor."""


def measure(options: argparse.Namespace, findings: Findings) -> None:
    """Add for each family its answers that are the processor's in float32, and by format those that are plain ones."""
    sizes = sizes_of(options)
    asked = Asked([TEXT], sizes.compared)
    names, workers = list(ALL)[: sizes.families], max(1, min(PROCESSES, usable_cores() // 2))
    fresh = multiprocessing.get_context("spawn")  # a forked process could not use the device
    shares = fresh.Queue()
    for first in range(workers):
        shares.put(sorted(os.sched_getaffinity(0))[first::workers])
    with ProcessPoolExecutor(min(workers, len(names)), fresh, keep_to, (shares,)) as pool:
        for name, outcome in [(name, pool.submit(compared, name, options.device, asked)) for name in names]:
            with findings.trying(name):
                findings.add(name, outcome.result())


def keep_to(shares: Any) -> None:
    """Keep this process to cores of its own: loading a stage uses all that there are."""
    os.sched_setaffinity(0, shares.get())
    torch.set_num_threads(1)


def compared(name: str, device: str, asked: Asked) -> dict[str, Any]:
    """The counts of a family's checkpoint. Raises DoesNotFit where this release of transformers lacks the family."""
    if (family := settings_of(name)["model_type"]) not in CONFIG_MAPPING:
        raise DoesNotFit(f"transformers {transformers.__version__} has no {family}")
    with tempfile.TemporaryDirectory() as folder:
        target = make_checkpoint(Path(folder), name, initializer_range=CALM)
        found: dict[str, Any] = {"like_cpu": like_cpu(target, device, asked)}
        return found | {form: like_plain(target, device, asked, own) for form, own in FORMATS.items()}


def like_plain(target: Path, device: str, asked: Asked, own: Mapping[str, Any]) -> list[int] | str:
    """The number of FlowSpec's answers that are plain decoding's, and that of all; a refusal where the family has
    nothing in that format."""
    flowspec = next(which for which, one in enumerate(strategies(STAGES)) if type(one).__name__ == "FlowSpec")
    try:
        engine = InProcessEngine(target, STAGES, NgramDrafter(LONGEST, SHORTEST), device=device, numerics=FAST, **own)
    except ConfigError as refused:
        return str(refused)
    plain, found = (ids_of(engine, which, asked) for which in (PLAIN, flowspec))
    return count_same(found, plain)
