"""A layer's way from its rows to its attention, and from there to the next layer: two calls of compiled code.

Shapes as in ``compiled.kernels``; A = H * e, the width of what attention gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.models.compiled.blocks import GROUP
from penstock.models.compiled.kept import exact
from penstock.models.compiled.kernels import add, add_and_norm, gate, norm, norm_heads, turn
from penstock.models.compiled.products import Weights, product


class Norm(NamedTuple):
    """The numbers of an ``RMSNorm``; none of a norm that is not there."""

    weight: np.ndarray
    least: np.float32


class Entering(NamedTuple):
    """What a layer computes with before its attention."""

    norm: Norm
    qkv: Weights
    bias: np.ndarray
    """Of queries, keys and values; empty where there is none."""
    query_norm: Norm
    key_norm: Norm
    queries: int
    """Heads."""
    rotated: int
    """Heads of queries and keys."""


class Leaving(NamedTuple):
    """What it computes with behind that."""

    o_proj: Weights
    norm: Norm
    gate_up: Weights
    down_proj: Weights
    width: int
    """F."""


@exact
def enter(hidden_ND: Any, layer: Any, cos_Nd: Any, sin_Nd: Any, out_XNd: Any, team: Any) -> None:
    """``out`` becomes the rows' queries, keys and values, rotated."""
    count, heads, width = len(hidden_ND), out_XNd.shape[0], out_XNd.shape[2]
    normed, qkv = np.empty_like(hidden_ND), np.empty((count, heads * width), np.float32)
    norm(hidden_ND, layer.norm.weight, layer.norm.least, normed)
    product(normed, layer.qkv, qkv, team)
    if len(layer.bias):
        for row in range(count):
            qkv[row] += layer.bias
    qkv_NXd = qkv.reshape((count, heads, width))
    if len(layer.query_norm.weight):
        norm_heads(qkv_NXd, layer.query_norm.weight, layer.query_norm.least, 0, layer.queries)
        norm_heads(qkv_NXd, layer.key_norm.weight, layer.key_norm.least, layer.queries, layer.rotated)
    turn(qkv_NXd, cos_Nd, sin_Nd, layer.rotated, out_XNd)


@exact
def leave(attended_NA: Any, hidden_ND: Any, layer: Any, out_ND: Any, team: Any) -> None:
    """``out`` becomes what the layer gives for ``hidden``, whose attention has given ``attended``."""
    count = len(hidden_ND)
    change, total, normed = np.empty_like(hidden_ND), np.empty_like(hidden_ND), np.empty_like(hidden_ND)
    product(attended_NA, layer.o_proj, change, team)
    add_and_norm(hidden_ND, change, layer.norm.weight, layer.norm.least, total, normed)
    gates = np.empty((count, 2 * layer.width), np.float32)
    opened = np.zeros((count, -(-layer.width // GROUP) * GROUP), np.float32)
    product(normed, layer.gate_up, gates, team)
    gate(gates, opened)
    product(opened, layer.down_proj, change, team)
    add(total, change, out_ND)
