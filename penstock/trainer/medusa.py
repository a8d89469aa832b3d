"""Medusa-1: heads on the frozen target, each distilled from what the target says further ahead.

Source: Cai et al., Medusa (arXiv 2401.10774), sections 2.1.1 and 2.2.1; FasterDecoding/Medusa's format.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.models.checkpoint import Checkpoint
from penstock.trainer.batches import Batch
from penstock.trainer.distill import Teaching
from penstock.trainer.kind import DECAY, Kind, Start, dtype_name

HEADS: Final = 5
LAYERS: Final = 1


class MedusaTrainee(nn.Module):
    """See ``kind.Trainee``. A step is a head: head k drafts from the state before row i what comes after row i + k."""

    def __init__(self, module: Any, head: nn.Module, steps: int, draft_ids_v: None) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self.steps = steps

    def forward(self, batch: Batch, seed: int) -> Tensor:
        teaching = Teaching(self.head, batch, None)
        losses = [
            DECAY**k * teaching.divergence(k, hidden, partial(self.logits, k))
            for k, hidden in enumerate(self.unroll(batch, self.steps))
        ]
        return torch.stack(losses).sum()

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        states_BnF = batch.states_BnF
        rows = states_BnF.shape[1]
        for k in range(min(steps, self.module.heads, rows)):
            yield states_BnF[:, : rows - k]

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.head_logits(step, hidden_nD)
        return logits_nV


def reads(target: Checkpoint) -> tuple[int, ...]:
    """The states after the final norm."""
    return (target.num_layers,)


def config(target: Checkpoint, name: str, drafted: int) -> dict[str, Any]:
    return {
        "medusa_num_heads": HEADS,
        "medusa_num_layers": LAYERS,
        "base_model_name_or_path": name,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "torch_dtype": dtype_name(target),
    }


def fresh(start: Start) -> dict[str, Tensor]:
    """Heads that say what the target's says, their blocks doing nothing yet."""
    width, head_VD = start.target.hidden_size, start.head()
    tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = torch.zeros(width, width)
            tensors[f"{head}.{layer}.linear.bias"] = torch.zeros(width)
        tensors[f"{head}.{LAYERS}.weight"] = head_VD.clone()
    return tensors


MEDUSA: Final = Kind(
    name="medusa",
    learning_rate=1e-3,
    betas=(0.9, 0.999),
    clip=1.0,
    steps=HEADS,
    file="medusa_lm_head.safetensors",
    reads=reads,
    config=config,
    fresh=fresh,
    trainee=MedusaTrainee,
)
