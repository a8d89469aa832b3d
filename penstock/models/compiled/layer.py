"""A fused layer whose quantised products have compiled loops between them: five calls in place of some thirty."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.models.attention import attend
from penstock.models.compiled import kernels
from penstock.models.compiled.rows import Room, Rows, by_rows
from penstock.models.fused.base import FusedBase
from penstock.models.fused.layer import FusedLayer
from penstock.models.fused.norms import RMSNorm, agree
from penstock.models.quantization.whole import WholeLinear

SAMPLES: Final = 33


class Norm(NamedTuple):
    """The numbers of an ``RMSNorm``."""

    weight: np.ndarray
    least: np.float32


def norm_of(norm: RMSNorm) -> Norm:
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

    def __init__(self, layer: FusedLayer, room: Room) -> None:
        super().__init__()
        self.layer_idx = layer.layer_idx
        self.heads = layer.heads
        self.scoring = layer.scoring
        self.qkv, self.o_proj = layer.qkv, layer.o_proj
        self.gate_up, self.down_proj = layer.gate_up, layer.down_proj
        self._linears: tuple[Any, ...] = (self.qkv, self.o_proj, self.gate_up, self.down_proj)
        self._room = room
        self._input_norm, self._mlp_norm = norm_of(layer.input_norm), norm_of(layer.mlp_norm)
        self._query_norm = None if layer.query_norm is None else norm_of(layer.query_norm)
        self._key_norm = None if layer.key_norm is None else norm_of(layer.key_norm)
        bias = layer.qkv.bias
        self._bias = None if bias is None else bias.detach().float().numpy()

    def forward(self, hidden: Tensor, rotation: Turn) -> Tensor:
        """[1, N, D] -> [1, N, D]"""
        qkv, o_proj, gate_up, down_proj = self._linears  # to look up a module's own takes longer
        entered, room = hidden[0].numpy(), self._room
        count, width = entered.shape
        rows, norm = room(count, width), self._input_norm
        by_rows(lambda own: kernels.norm(entered[own], *norm, rows.array[own]), count)
        seen = self._attend(qkv.product(rows.tensor).numpy(), rotation)
        attended, rows = self._after_attention(entered, o_proj.product(seen).numpy())
        gates = gate_up.product(rows.tensor).numpy()
        opened = room(count, gates.shape[1] // 2)
        by_rows(lambda own: kernels.gate(gates[own], opened.array[own]), count)
        change, left = down_proj.product(opened.tensor).numpy(), np.empty_like(entered)
        by_rows(lambda own: kernels.add(attended[own], change[own], left[own]), count)
        return torch.from_numpy(left)[None]

    def _after_attention(self, entered: np.ndarray, change: np.ndarray) -> tuple[np.ndarray, Rows]:
        """The sum of both, and its norm as the feed-forward takes it."""
        total, norm = np.empty_like(entered), self._mlp_norm
        rows = self._room(*entered.shape)
        by_rows(
            lambda own: kernels.add_and_norm(entered[own], change[own], *norm, total[own], rows.array[own]),
            len(entered),
        )
        return total, rows

    def _attend(self, products: np.ndarray, rotation: Turn) -> Tensor:
        """What the rows see, all heads side by side: [N, X * d] -> [N, H * e]"""
        heads = self.heads
        count = len(products)
        if self._bias is not None:
            products += self._bias
        qkv_NXd = products.reshape(count, -1, heads.width)
        if self._query_norm is not None and self._key_norm is not None:
            kernels.norm_heads(qkv_NXd, self._query_norm.weight, self._query_norm.least, 0, heads.queries)
            kernels.norm_heads(qkv_NXd, self._key_norm.weight, self._key_norm.least, heads.queries, heads.rotated)
        turned = torch.empty(qkv_NXd.shape[1], count, heads.width)
        kernels.turn(qkv_NXd, rotation.cos, rotation.sin, heads.rotated, turned.numpy())
        stored = turned[heads.queries :]
        keys, values = stored[: heads.groups], stored[heads.groups :]
        output_NHe = attend(self, turned[: heads.queries], keys, values, None, joint=stored, **self.scoring)
        return output_NHe.reshape(count, -1)


class CompiledBase(FusedBase):
    """A stage's compiled layers."""

    def rotation(self, cos_1Nd: Tensor, sin_1Nd: Tensor) -> Turn:
        return Turn(cos_1Nd[0].contiguous().numpy(), sin_1Nd[0].contiguous().numpy())


def compiled(base: FusedBase) -> FusedBase:
    """``base`` with compiled layers, where each of its own has the form for it; else ``base`` itself."""
    if not all(map(can_compile, base.own)):
        return base
    room, own = Room(), []
    for index, layer in enumerate(base.layers):
        if isinstance(layer, FusedLayer):
            base.layers[index] = CompiledLayer(layer, room)
            own.append(base.layers[index])
    return CompiledBase(base.embed_tokens, base.rotary_emb, base.layers, own)


def can_compile(layer: FusedLayer) -> bool:
    """Whether loops are there for all that lies between the layer's products, and these are quantised."""
    linears = (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)
    norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    return (
        all(isinstance(linear, WholeLinear) for linear in linears)
        and all(linear.bias is None for linear in linears[1:])
        and all(norm is None or isinstance(norm, RMSNorm) for norm in norms)
        and is_silu(layer.act)
    )


def is_silu(act: Any) -> bool:
    """Whether an activation is x / (1 + e^-x), by what it makes of a sample."""
    sample = torch.linspace(-8, 8, SAMPLES)
    return agree(act(sample), torch.nn.functional.silu(sample))
