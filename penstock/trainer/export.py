"""Drafters as files, in the formats that other engines load.

vllm-project/speculators' for eagle3, SafeAILab's for eagle, FasterDecoding's for medusa.

A fresh drafter is written first and opened like any other, so that the module in training is built by the loader that
the pipeline uses. The trained one has the same files with other weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.models.checkpoint import Checkpoint
from penstock.models.speculators.formats import SpeculatorCheckpoint, open_speculator
from penstock.models.speculators.loader import MAPS
from penstock.trainer.cache import write_whole
from penstock.trainer.kind import Kind, Start, dtype_name

CONFIG: Final = "config.json"
EMBEDDING: Final = "embed_tokens.weight"
HEAD: Final = {"lm_head.weight": "head.0.weight"}
"""Tensors of the layouts that the modules call otherwise."""


def write_fresh(folder: Path, kind: Kind, start: Start, name: str, drafted: int) -> None:
    """Write an untrained drafter, for the target called ``name``, that can draft ``drafted`` tokens."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_config(unfinished, kind.config(start.target, name, drafted))
    write_whole(kind.fresh(start), unfinished / kind.file)
    unfinished.replace(folder)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def trained_parameters(module: nn.Module, checkpoint: SpeculatorCheckpoint) -> dict[str, nn.Parameter]:
    """What is learned, by the names in ``checkpoint.tensors``: all that its file holds but embedding and token ids."""
    names = [name for name in checkpoint.tensors if name not in (*MAPS, EMBEDDING)]
    return {name: module.get_parameter(HEAD.get(name, name)) for name in names}


def write_trained(
    output: Path, kind: Kind, fresh: SpeculatorCheckpoint, module: nn.Module, target: Checkpoint
) -> SpeculatorCheckpoint:
    """Write the drafter as trained into ``output``, in the type that the target is stored in, and open it again.

    Raises ConfigError if what was written cannot be opened.
    """
    dtype = getattr(torch, dtype_name(target))
    tensors = load_file(fresh.path / kind.file)
    for name, parameter in trained_parameters(module, fresh).items():
        tensors[fresh.tensors[name].name] = parameter.detach().cpu()
    if kind.name == "eagle":
        # EAGLE's own code wants the embedding in the file; it is the target's.
        tensors[EMBEDDING] = module.get_parameter(EMBEDDING).detach().cpu()
    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(fresh.path / CONFIG, output / CONFIG)
    write_whole({name: stored(tensor, dtype) for name, tensor in tensors.items()}, output / kind.file)
    return open_speculator(str(output), target)


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in ``dtype``, ids and marks as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
