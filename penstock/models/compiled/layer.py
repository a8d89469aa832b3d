"""A fused layer of quantised products, compiled but for its attention: two calls in place of some thirty."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.models.attention import attend
from penstock.models.compiled.passes import Entering, Leaving, Norm, enter, leave
from penstock.models.compiled.products import whole_team
from penstock.models.fused.base import FusedBase
from penstock.models.fused.layer import FusedLayer
from penstock.models.fused.norms import RMSNorm, agree
from penstock.models.quantization.whole import WholeLinear

SAMPLES: Final = 33


def norm_of(norm: RMSNorm | None) -> Norm:
    if norm is None:
        return Norm(np.empty(0, np.float32), np.float32(0))
    return Norm(norm.scaled.numpy(), np.float32(norm.least))


class Turn(NamedTuple):
    """Cosines and sines of each row [N, d]."""

    cos: np.ndarray
    sin: np.ndarray


class CompiledLayer(nn.Module):
    """Computes what the ``FusedLayer`` does that it is made of, in float32 on a CPU; takes over its parts."""

    growth: Final = None
    chunk: Final = None
    """See ``models.chunked``. To find that a module lacks something takes longer than many of its loops."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer_idx = layer.layer_idx
        self.heads = heads = layer.heads
        self.scoring = layer.scoring
        self.qkv, self.o_proj = layer.qkv, layer.o_proj
        self.gate_up, self.down_proj = layer.gate_up, layer.down_proj
        bias = layer.qkv.bias
        self._entering = Entering(
            norm_of(layer.input_norm),
            layer.qkv.weights,
            np.empty(0, np.float32) if bias is None else bias.detach().float().numpy(),
            norm_of(layer.query_norm),
            norm_of(layer.key_norm),
            heads.queries,
            heads.rotated,
        )
        weights = layer.o_proj.weights, norm_of(layer.mlp_norm), layer.gate_up.weights, layer.down_proj.weights
        self._leaving = Leaving(*weights, layer.down_proj.inputs)
        self._sizes = heads.rotated + heads.groups, heads.queries, heads.groups, heads.width

    def forward(self, hidden: Tensor, rotation: Turn) -> Tensor:
        """[1, N, D] -> [1, N, D]"""
        entered = hidden[0].contiguous().numpy()
        count = len(entered)
        heads, queries, groups, width = self._sizes
        turned = torch.empty(heads, count, width)
        qkv_XNd = turned.numpy()
        team = whole_team()
        enter(entered, self._entering, *rotation, qkv_XNd, team)
        stored = turned[queries:]
        keys, values = stored[:groups], stored[groups:]
        output_NHe = attend(self, turned[:queries], keys, values, None, joint=stored, **self.scoring)
        seen, left = output_NHe.reshape(count, -1).numpy(), np.empty_like(entered)
        leave(seen, entered, self._leaving, left, team)
        return torch.from_numpy(left)[None]


class CompiledBase(FusedBase):
    """A stage's compiled layers."""

    def rotation(self, cos_1Nd: Tensor, sin_1Nd: Tensor) -> Turn:
        return Turn(cos_1Nd[0].contiguous().numpy(), sin_1Nd[0].contiguous().numpy())


def compiled(base: FusedBase) -> FusedBase:
    """``base`` with compiled layers, where each of its own has the form for it; else ``base`` itself."""
    if not all(map(can_compile, base.own)):
        return base
    own = []
    for index, layer in enumerate(base.layers):
        if isinstance(layer, FusedLayer):
            base.layers[index] = CompiledLayer(layer)
            own.append(base.layers[index])
    return CompiledBase(base.embed_tokens, base.rotary_emb, base.layers, own)


def can_compile(layer: FusedLayer) -> bool:
    """Whether loops are there for all that lies between the layer's products, and these are quantised."""
    linears = (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)
    norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    return (
        all(isinstance(linear, WholeLinear) and linear.in_blocks for linear in linears)
        and all(linear.in_groups for linear in linears[:-1])
        and all(linear.bias is None for linear in linears[1:])
        and all(norm is None or isinstance(norm, RMSNorm) for norm in norms)
        and is_silu(layer.act)
    )


def is_silu(act: Any) -> bool:
    """Whether an activation is x / (1 + e^-x), by what it makes of a sample."""
    sample = torch.linspace(-8, 8, SAMPLES)
    return agree(act(sample), torch.nn.functional.silu(sample))
