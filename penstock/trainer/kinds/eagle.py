"""EAGLE-1 (EAGLE-2 has the same weights): regression to the next feature, distillation to the next token.

Source: Li et al., EAGLE (arXiv 2401.15077), section 4.1; SafeAILab/EAGLE's trainer for noise and settings, and its
format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.checkpoint import Checkpoint
from penstock.trainer.data.batches import Batch
from penstock.trainer.kinds.base import Kind, Start, layer_config
from penstock.trainer.kinds.chain import unroll
from penstock.trainer.kinds.distill import Teaching
from penstock.trainer.kinds.export import SpeculatorFiles
from penstock.trainer.options import TrainOptions

NOISE: Final = 0.2
"""Width of the uniform noise on features, since drafting goes on from features that are not quite the target's."""
TOKEN_WEIGHT: Final = 0.1
"""Weight of the distillation relative to the regression."""


class EagleTrainee(nn.Module):
    """A trainee (``base.Trainee``) with EAGLE-1's two losses."""

    def __init__(self, module: Any, head: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.head = head

    def forward(self, batch: Batch, seed: int) -> Tensor:
        teaching = Teaching(self.head, batch, None)
        taught_Bn = teaching.taught_Bn
        hidden_BnD = next(unroll(self.module, batch, 1, noise_BnD=noise_for(batch, seed)))
        given, aimed = hidden_BnD[taught_Bn].float(), batch.final_BnD[taught_Bn].float()
        # A mean over features but a sum over rows, as the distillation is.
        regression = F.smooth_l1_loss(given, aimed, reduction="sum") / aimed.shape[-1]
        return regression + TOKEN_WEIGHT * teaching.divergence(hidden_BnD, self.module.logits)

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        return unroll(self.module, batch, steps)

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.logits(hidden_nD)
        return logits_nV


def noise_for(batch: Batch, seed: int) -> Tensor:
    """Noise drawn on the host from the seed alone, so that a resumed run and any device draw the same."""
    states_BnF = batch.states_BnF
    drawn = torch.rand(states_BnF.shape, generator=torch.Generator().manual_seed(seed))
    return ((drawn - 0.5) * NOISE).to(states_BnF.device)


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """The number of the states after the final norm."""
    return (target.num_layers,)


def config(start: Start) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **layer_config(start.target), "bias": True}


def fresh(start: Start) -> dict[str, Tensor]:
    width = start.target.hidden_size
    return {
        "fc.weight": start.matrix(width, 2 * width),
        "fc.bias": torch.zeros(width),
        **start.layer("layers.0", width),
    }


EAGLE: Final = Kind(
    name="eagle",
    learning_rate=3e-5,
    betas=(0.9, 0.95),
    clip=0.5,
    files=SpeculatorFiles(config, fresh, with_embedding=True),
    settle=lambda options, target: options,
    reads=reads,
    trainee=lambda module, head, options, target, draft_ids_v: EagleTrainee(module, head),
)
