"""Writes speculators in the formats that other engines load.

The formats are vllm-project/speculators' for eagle3, SafeAILab's for eagle, FasterDecoding's for medusa or, where it
cannot draft all tokens, vLLM's, yuyijiong/speculative_pipeline_decoding's for spd and early-exit, and Qwen's for mtp.

A fresh drafter is written first and opened like any other, so that the module in training is built by the pipeline's
own loader. The trained one has the same files with other weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.models.checkpoint import Checkpoint
from penstock.models.speculators.base import MAPS
from penstock.models.speculators.formats import SpeculatorCheckpoint, open_speculator
from penstock.models.speculators.loader import load_speculator
from penstock.models.weight_files import SINGLE_FILE
from penstock.trainer.data.cache import write_whole
from penstock.trainer.kinds.base import Start, dtype_name

CONFIG: Final = "config.json"
EMBEDDING: Final = "embed_tokens.weight"
HEAD: Final = {"lm_head.weight": "head.0.weight"}
"""Tensors of the formats whose names differ in the modules."""


@dataclass(frozen=True)
class SpeculatorFiles:
    """The files of a kind of speculator (``base.Files``)."""

    config: Callable[[Start], dict[str, Any]]
    """Makes the content of config.json."""
    fresh: Callable[[Start], dict[str, Tensor]]
    """Makes the initial tensors, under the format's names."""
    file: str = SINGLE_FILE
    with_embedding: bool = False
    """Whether the format wants an embedding in the file, which is the target's."""

    def begin(self, folder: Path, start: Start) -> None:
        (folder / CONFIG).write_text(json.dumps(self.config(start), indent=2) + "\n", encoding="utf-8")
        write_whole(self.fresh(start), folder / self.file)

    def open(self, folder: Path, target: Checkpoint) -> SpeculatorCheckpoint:
        return open_speculator(str(folder), target)

    def load(
        self, opened: SpeculatorCheckpoint, target: Checkpoint, device: str
    ) -> tuple[Any, dict[str, nn.Parameter]]:
        module = load_speculator(opened, target, "float32", device)
        return module, trained_parameters(module, opened)

    def write(self, output: Path, opened: SpeculatorCheckpoint, module: nn.Module, target: Checkpoint) -> None:
        dtype = getattr(torch, dtype_name(target))
        tensors = load_file(opened.path / self.file)
        for name, parameter in trained_parameters(module, opened).items():
            tensors[opened.tensors[name].name] = parameter.detach().cpu()
        if self.with_embedding:
            tensors[EMBEDDING] = module.get_parameter(EMBEDDING).detach().cpu()
        output.mkdir(parents=True, exist_ok=True)
        shutil.copy(opened.path / CONFIG, output / CONFIG)
        write_whole({name: stored(tensor, dtype) for name, tensor in tensors.items()}, output / self.file)


def trained_parameters(module: nn.Module, checkpoint: SpeculatorCheckpoint) -> dict[str, nn.Parameter]:
    """The trained parameters by their names in ``checkpoint.tensors``: all in its file but embedding and token ids."""
    buffers = dict(module.named_buffers())  # for example biases that a router adapts during training
    names = [name for name in checkpoint.tensors if name not in (*MAPS, EMBEDDING) and name not in buffers]
    return {name: module.get_parameter(HEAD.get(name, name)) for name in names}


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights converted to ``dtype``; ids and masks as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
