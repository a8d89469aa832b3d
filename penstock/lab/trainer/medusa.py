"""Medusa-1: heads on the frozen target, each distilled from the target's distribution further ahead.

Source: Cai et al., Medusa (arXiv 2401.10774), sections 2.1.1 and 2.2.1; FasterDecoding/Medusa's format, or vLLM's where
not every token can be drafted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer.kinds import DECAY, Kind, SpeculatorFiles, Start, Teaching, dtype_name, with_usual
from penstock.lab.trainer.options import HEADS, TrainOptions
from penstock.lab.trainer.states import Batch

LAYERS: Final = 1
"""Residual blocks of each head, as in the paper."""


class MedusaTrainee(nn.Module):
    """A trainee (``kinds.Trainee``) whose steps are heads.

    Head k drafts the token after row i + k, from the state before row i.
    """

    def __init__(self, module: Any, head: nn.Module, draft_ids_v: Tensor | None) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self.draft_ids_v = None if draft_ids_v is None else nn.Buffer(draft_ids_v, persistent=False)

    def forward(self, batch: Batch, seed: int) -> Tensor:
        teaching = Teaching(self.head, batch, self.draft_ids_v)
        losses = [
            DECAY**k * teaching.divergence(hidden, partial(self._drafted, k))
            for k, hidden in enumerate(self.unroll(batch, self.module.heads))
        ]
        return torch.stack(losses).sum()

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        states_BnF = batch.states_BnF
        rows = states_BnF.shape[1]
        for k in range(min(steps, self.module.heads, rows)):
            # The state before row i drafts for row i + k, so that the last k states have nothing to draft for.
            yield states_BnF[:, : rows - k]

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.head_logits(step, hidden_nD)
        return logits_nV

    def _drafted(self, head: int, hidden_nD: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted."""
        logits_nv: Tensor = self.module.lm_heads[head](self.module.blocks[head](hidden_nD))
        return logits_nv


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with the kind's defaults."""
    return with_usual(options, heads=HEADS)


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """The number of the state after the final norm."""
    return (target.num_layers,)


def config(start: Start) -> dict[str, Any]:
    """The content of config.json: FasterDecoding's, or vLLM's for a vocabulary of the heads' own."""
    target, heads, name = start.target, start.options.heads, start.options.model
    common = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "torch_dtype": dtype_name(target),
    }
    if start.draft_ids_v is None:
        return {"medusa_num_heads": heads, "medusa_num_layers": LAYERS, "base_model_name_or_path": name, **common}
    vllms = {"architectures": ["MedusaModel"], "model_type": "medusa"}
    sizes = {"num_heads": heads, "num_hidden_layers": LAYERS, "truncated_vocab_size": start.drafted}
    return {**vllms, **sizes, **common}


def fresh(start: Start) -> dict[str, Tensor]:
    """Copies of the target's head, after blocks that change nothing yet."""
    width, head_vD, ids_v = start.target.hidden_size, start.head(), start.draft_ids_v
    assert start.options.heads is not None
    tensors = {} if ids_v is None else {"token_map": ids_v}
    for head in range(start.options.heads):
        for layer in range(LAYERS):
            if ids_v is None:
                tensors[f"{head}.{layer}.linear.weight"] = torch.zeros(width, width)
                tensors[f"{head}.{layer}.linear.bias"] = torch.zeros(width)
            else:
                tensors[f"blocks.{head}.layers.{layer}.weight"] = torch.zeros(width, width)
        last = f"{head}.{LAYERS}.weight" if ids_v is None else f"lm_heads.{head}.weight"
        tensors[last] = head_vD.clone()
    return tensors


MEDUSA: Final = Kind(
    name="medusa",
    learning_rate=1e-3,
    betas=(0.9, 0.999),
    clip=1.0,
    files=SpeculatorFiles(config, fresh, "medusa_lm_head.safetensors"),
    settle=settle,
    reads=reads,
    trainee=lambda module, head, options, target, draft_ids_v: MedusaTrainee(module, head, draft_ids_v),
)
