"""A decoder layer of llama's form, whatever the architecture calls it, with half the operations.

Queries, keys and values come from one product, as do the feed-forward's gate and its input. An architecture's own layer
has this form if it has these parts and no others, and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.models.attention import attend
from penstock.models.fused.linears import SideBySide, joined
from penstock.models.fused.norms import rms_norm
from penstock.models.fused.rotary import Rotation

PARTS: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS: Final = {"q_norm", "k_norm"}
"""Norms over the width of each query and key head, as in qwen3."""
MLP_PARTS: Final = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Heads:
    """How many heads the rows of the joint product hold, and how wide they are."""

    def __init__(self, attention: Any) -> None:
        self.width = int(attention.head_dim)
        self.queries = attention.q_proj.out_features // self.width
        self.groups = attention.k_proj.out_features // self.width

    @property
    def rotated(self) -> int:
        count: int = self.queries + self.groups
        return count


class FusedLayer(nn.Module):
    """``scoring`` holds the arguments of the layer's attention: its scale, and a window where there is one."""

    def __init__(self, layer: Any, scoring: dict[str, Any]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.heads = Heads(attention)
        self.scoring = scoring
        self.input_norm = rms_norm(layer.input_layernorm)
        self.mlp_norm = rms_norm(layer.post_attention_layernorm)
        self.qkv: nn.Module = SideBySide([attention.q_proj, attention.k_proj, attention.v_proj])
        self.query_norm = rms_norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = rms_norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.o_proj = attention.o_proj
        self.gate_up: nn.Module = SideBySide([mlp.gate_proj, mlp.up_proj])
        self.act = mlp.act_fn
        self.down_proj = mlp.down_proj

    def join(self) -> None:
        """Join linear layers that read the same input into one, where possible."""
        self.qkv, self.gate_up = joined(self.qkv), joined(self.gate_up)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLayer:
        # torch's hook for what moves a module, which knows only parameters and buffers: sinks are neither here.
        super()._apply(fn, recurse)
        self.scoring = {name: fn(one) if isinstance(one, Tensor) else one for name, one in self.scoring.items()}
        return self

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[1, N, D] -> [1, N, D]"""
        hidden = hidden + self.o_proj(self.attend(self.input_norm(hidden), rotation))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down_proj(self.act(gate) * up)

    def attend(self, normed: Tensor, rotation: Rotation) -> Tensor:
        """The attention's output, all heads side by side: [1, N, D] -> [1, N, heads * d]."""
        heads = self.heads
        qkv_NXd = self.qkv(normed).view(normed.shape[1], -1, heads.width)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys, values = qkv_NXd.split([heads.queries, heads.groups, heads.groups], dim=1)
            qkv_NXd = torch.cat([self.query_norm(queries), self.key_norm(keys), values], dim=1)
        qkv_XNd = rotation.apply(qkv_NXd).transpose(0, 1)
        stored_XNd = qkv_XNd[heads.queries :]
        output_NHe = attend(
            self,
            qkv_XNd[: heads.queries],
            stored_XNd[: heads.groups],
            stored_XNd[heads.groups :],
            None,
            joint=stored_XNd,
            **self.scoring,
        )
        return output_NHe.reshape(1, len(qkv_NXd), -1)


def has_form(layer: Any) -> bool:
    """Whether a layer has exactly the parts of llama's."""
    if parts_of(layer) != PARTS or parts_of(layer.mlp) != MLP_PARTS:
        return False
    attention = layer.self_attn
    if parts_of(attention) not in (ATTENTION_PARTS, ATTENTION_PARTS | HEAD_NORMS):
        return False
    linears = [getattr(attention, name) for name in sorted(ATTENTION_PARTS)]
    linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    return isinstance(getattr(attention, "head_dim", None), int) and all(
        isinstance(getattr(linear, "out_features", None), int) for linear in linears
    )


def parts_of(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
