"""Gemma 3n's sparse feed-forwards without what transformers works out anew, and has a GPU wait for, in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from penstock.models.fused.agreement import sample_of


class Cutoff(nn.Module):
    """Takes off each row what all but a share of numbers that are normally distributed stay below; the rest is 0.

    It gives the same bits as ``_gaussian_topk``. That makes the multiplier on the device of the rows, and torch's
    distributions then read it to see whether it is valid.
    """

    def __init__(self, sparsity: float) -> None:
        super().__init__()
        multiplier = Normal(0.0, 1.0).icdf(torch.tensor(sparsity, dtype=torch.float32))
        self.register_buffer("multiplier", multiplier, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[.., I] -> [.., I]"""
        multiplier: Any = self.multiplier
        mean, spread = inputs.mean(dim=-1, keepdim=True), inputs.std(dim=-1, keepdim=True, unbiased=False)
        return nn.functional.relu(inputs - (mean + spread * multiplier.type(inputs.dtype)))


@torch.no_grad()
def keep_cutoffs(layers: Sequence[Any]) -> None:
    """Give sparse feed-forwards their ``Cutoff``, in place, where a sample shows no difference."""
    for layer in layers:
        feed: Any = getattr(layer, "mlp", None)
        sparsity = getattr(feed, "activation_sparsity", 0.0)
        if not sparsity or not hasattr(feed, "_gaussian_topk"):
            continue
        cutoff, sample = Cutoff(sparsity), sample_of(feed.down_proj.weight)
        if torch.equal(cutoff(sample), feed._gaussian_topk(sample)):
            feed.cutoff = cutoff  # a part of the layer, so that it moves with it
            vars(feed)["_gaussian_topk"] = cutoff  # found before the method of its class
