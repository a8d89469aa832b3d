"""EAGLE, EAGLE-3, Medusa and SPD written down plainly from their formulas, head by head, for the modules' tests.

Shapes: N rows, D hidden size, d width of a head. ``sees_NN`` is True where a row attends to another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.speculators import HEADS, KEY_HEADS

EPS = 1e-5
TARGETS_EPS = 1e-6
"""Epsilon of the norms that SPD's module shares with its target."""
Tensors = Mapping[str, Tensor]


def rms(x_ND: Tensor, weight_D: Tensor, eps: float = EPS) -> Tensor:
    return x_ND / torch.sqrt((x_ND**2).mean(-1, keepdim=True) + eps) * weight_D


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
    if f"{prefix}.q_norm.weight" in t:
        query, key = (
            torch.cat([rms(x, t[f"{prefix}.{name}_norm.weight"], TARGETS_EPS) for x in part.split(width, -1)], dim=-1)
            for name, part in (("q", query), ("k", key))
        )
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


def spd(
    t: Tensors,
    features_ND: Tensor,
    levels: Sequence[int],
    positions_N: Tensor,
    sees_NN: Tensor,
    theta: float,
    stages: int | None = None,
) -> Tensor:
    """SPD's layers over features at their levels, before the target's norm [N, D].

    With ``stages`` it is the paper's module: rows above level 0 give every layer keys and values of their features,
    led through its own matrix for that depth, and are nothing else.
    """
    x, layer = features_ND, 0
    while (prefix := f"spec_layers.{layer}") + ".input_layernorm.weight" in t:
        for i, level in enumerate(levels if stages is not None else ()):
            if level:
                matrix = t[f"fixed_stage_per_layer_projs.{layer}.{stages - level}.weight"]
                x = torch.cat([x[:i], (matrix @ features_ND[i])[None], x[i + 1 :]])
        normed = rms(x, t[f"{prefix}.input_layernorm.weight"], TARGETS_EPS)
        x = x + attention(t, f"{prefix}.self_attn", normed, positions_N, sees_NN, theta)
        x = x + mlp(t, f"{prefix}.mlp", rms(x, t[f"{prefix}.post_attention_layernorm.weight"], TARGETS_EPS))
        layer += 1
    return x


def spd_feature(t: Tensors, level: int, states: Sequence[Tensor], stages: int | None = None) -> Tensor:
    """g of one token from its states, the embedding among them (Eq. 1) [D]."""
    name = f"aggr_projs.{level}.weight"
    if stages is not None:
        name = f"stage_projs.{stages - level}.weight" if level else "g0_proj.weight"
    return t[name] @ torch.cat(list(states))


def scattered(logits_nv: Tensor, ids: list[int], vocab_size: int) -> Tensor:
    """Logits scattered column by column into the target's vocabulary."""
    full = torch.full((len(logits_nv), vocab_size), -math.inf)
    for column, token in enumerate(ids):
        full[:, token] = logits_nv[:, column]
    return full
