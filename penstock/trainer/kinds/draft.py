"""A small model of the target's own architecture, distilled from it, for method draft_model.

Source: Zhou et al., DistillSpec (arXiv 2310.08461), with the target's distributions over given texts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn

from penstock.models.checkpoint import Checkpoint
from penstock.models.gate import check_supported
from penstock.models.speculators.loader import TargetHead
from penstock.models.stage_model import NormOnly
from penstock.trainer.data.batches import Batch
from penstock.trainer.kinds.base import Kind, with_usual
from penstock.trainer.kinds.distill import Teaching
from penstock.trainer.kinds.draft_files import DraftFiles
from penstock.trainer.options import DRAFT_LAYERS, TrainOptions, check_within


class DraftHead(TargetHead):
    """The final norm and head of a model in training, whose weights it shares."""

    def __init__(self, causal: Any, base: str) -> None:
        nn.Module.__init__(self)
        self._causal = copy.copy(causal)
        self._causal._modules = {**causal._modules, base: NormOnly(nn.Identity(), causal._modules[base])}


class DraftTrainee(nn.Module):
    """A trainee (``base.Trainee``) with a single step, because a small model drafts alike at every depth."""

    def __init__(self, module: Any, head: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self._base = check_supported(module.config).base
        self._own_head = DraftHead(module, self._base)

    def forward(self, batch: Batch, seed: int) -> Tensor:
        (hidden_BnD,) = self.unroll(batch, 1)
        return Teaching(self.head, batch, None).divergence(hidden_BnD, self._own_head)

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        base = getattr(self.module, self._base)
        yield base(input_ids=batch.tokens_BL[:, :-1], use_cache=False).last_hidden_state[:, 1:]

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self._own_head(hidden_nD)
        return logits_nV


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    options = with_usual(options, layers=min(DRAFT_LAYERS, target.num_layers))
    check_within(options, target.num_layers, "layers")
    return options


DRAFT: Final = Kind(
    name="draft",
    learning_rate=1e-4,
    betas=(0.9, 0.999),
    clip=1.0,
    files=DraftFiles(),
    settle=settle,
    reads=lambda options, target: (),
    trainee=lambda module, head, options, target, draft_ids_v: DraftTrainee(module, head),
)
