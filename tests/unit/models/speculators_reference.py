"""EAGLE, EAGLE-3 and Medusa written down plainly from their formulas, head by head: what the modules are held against.

Shapes: N rows, D hidden size, d width of a head. ``sees_NN`` is True where a row attends to another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.speculators import HEADS, KEY_HEADS

EPS = 1e-5
Tensors = Mapping[str, Tensor]


def rms(x_ND: Tensor, weight_D: Tensor) -> Tensor:
    return x_ND / torch.sqrt((x_ND**2).mean(-1, keepdim=True) + EPS) * weight_D


def rotated(x_Nd: Tensor, positions_N: Tensor, theta: float) -> Tensor:
    """Llama's rotary embedding: pair (i, i + d/2) turns by position / theta^(2i/d)."""
    half = x_Nd.shape[-1] // 2
    angles = positions_N[:, None] / theta ** (torch.arange(half) / half)
    first, second = x_Nd[:, :half], x_Nd[:, half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(t: Tensors, prefix: str, x: Tensor, positions_N: Tensor, sees_NN: Tensor, theta: float) -> Tensor:
    def projected(name: str) -> Tensor:
        bias = t.get(f"{prefix}.{name}_proj.bias", torch.zeros(1))
        return x @ t[f"{prefix}.{name}_proj.weight"].T + bias

    query, key, value = projected("q"), projected("k"), projected("v")
    width, outputs = query.shape[1] // HEADS, []
    for head in range(HEADS):
        own = slice(head * width, (head + 1) * width)
        group = head // (HEADS // KEY_HEADS)
        shared = slice(group * width, (group + 1) * width)
        turned = (rotated(part, positions_N, theta) for part in (query[:, own], key[:, shared]))
        scores_NN = torch.matmul(next(turned), next(turned).T) / math.sqrt(width)
        outputs.append(scores_NN.masked_fill(~sees_NN, -math.inf).softmax(-1) @ value[:, shared])
    return torch.cat(outputs, dim=-1) @ t[f"{prefix}.o_proj.weight"].T + t.get(f"{prefix}.o_proj.bias", torch.zeros(1))


def mlp(t: Tensors, prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ t[f"{prefix}.gate_proj.weight"].T, x @ t[f"{prefix}.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ t[f"{prefix}.down_proj.weight"].T


def eagle(
    t: Tensors, embedding: Tensor, tokens_N: Tensor, feature: Tensor, positions_N: Tensor, sees_NN: Tensor, theta: float
) -> Tensor:
    """fc(cat[embedding, feature]) through one layer without a first norm [N, D]."""
    x = torch.cat([embedding[tokens_N], feature], dim=-1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(1))
    x = x + attention(t, "layers.0.self_attn", x, positions_N, sees_NN, theta)
    return x + mlp(t, "layers.0.mlp", rms(x, t["layers.0.post_attention_layernorm.weight"]))


def eagle3(
    t: Tensors,
    embedding: Tensor,
    tokens_N: Tensor,
    feature: Tensor,
    positions_N: Tensor,
    sees_NN: Tensor,
    theta: float,
    normed_residual: bool = False,
) -> Tensor:
    """Attention over cat[input_layernorm(embedding), hidden_norm(feature)]; before the last norm [N, D]."""
    normed = rms(feature, t["midlayer.hidden_norm.weight"])
    x = torch.cat([rms(embedding[tokens_N], t["midlayer.input_layernorm.weight"]), normed], dim=-1)
    residual = normed if normed_residual else feature
    x = residual + attention(t, "midlayer.self_attn", x, positions_N, sees_NN, theta)
    return x + mlp(t, "midlayer.mlp", rms(x, t["midlayer.post_attention_layernorm.weight"]))


def medusa(t: Tensors, head: int, layers: int, hidden: Tensor) -> Tensor:
    """Logits of FasterDecoding's head: x + SiLU(Wx + b), ``layers`` times, then its own matrix."""
    for layer in range(layers):
        inner = hidden @ t[f"{head}.{layer}.linear.weight"].T + t[f"{head}.{layer}.linear.bias"]
        hidden = hidden + inner * torch.sigmoid(inner)
    return hidden @ t[f"{head}.{layers}.weight"].T


def scattered(logits_nv: Tensor, ids: list[int], vocab_size: int) -> Tensor:
    """Column by column into the target's vocabulary."""
    full = torch.full((len(logits_nv), vocab_size), -math.inf)
    for column, token in enumerate(ids):
        full[:, token] = logits_nv[:, column]
    return full
