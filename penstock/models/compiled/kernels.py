"""The compiled loops. Each goes row by row: what a row becomes depends on nothing but the row, to the last bit.

Shapes: N rows, D hidden size, F of the feed-forward, H query heads in K groups, X = H + 2 K heads of queries, keys and
values side by side, d and e the widths of a head's keys and values. Numbers are float32 where nothing else is said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from penstock.models.compiled.heads import mixed, scores
from penstock.models.compiled.kept import fast
from penstock.models.compiled.numbers import exp


@fast
def norm(hidden_ND: Any, weight_D: Any, least: Any, out_ND: Any) -> None:
    """x * weight / sqrt(sum(x^2) + least^2): an RMS norm, see ``fused.norms.RMSNorm``."""
    for row in range(hidden_ND.shape[0]):
        _norm_row(hidden_ND[row], weight_D, least, out_ND[row])


@fast
def add_and_norm(hidden_ND: Any, change_ND: Any, weight_D: Any, least: Any, sum_ND: Any, out_ND: Any) -> None:
    """``sum`` becomes hidden + change, ``out`` its norm."""
    add(hidden_ND, change_ND, sum_ND)
    norm(sum_ND, weight_D, least, out_ND)


@fast
def add(hidden_ND: Any, change_ND: Any, sum_ND: Any) -> None:
    for row in range(len(hidden_ND)):
        hidden, change, total = hidden_ND[row], change_ND[row], sum_ND[row]
        for column in range(len(hidden)):
            total[column] = hidden[column] + change[column]


@njit(inline="always")
def _norm_row(row: Any, weight: Any, least: Any, out: Any) -> None:
    squares = least * least
    for column in range(len(weight)):
        squares += row[column] * row[column]
    scale = np.float32(1) / np.sqrt(squares)
    for column in range(len(weight)):
        out[column] = row[column] * scale * weight[column]


@fast
def norm_heads(qkv_NXd: Any, weight_d: Any, least: Any, first: int, last: int) -> None:
    """Norms of the width of a head, in place, of heads [first, last) of every row."""
    for row in range(qkv_NXd.shape[0]):
        for head in range(first, last):
            _norm_row(qkv_NXd[row, head], weight_d, least, qkv_NXd[row, head])


@fast
def turn(qkv_NXd: Any, cos_Nd: Any, sin_Nd: Any, rotated: int, out_XNd: Any) -> None:
    """Rotary embedding of the first ``rotated`` heads, the others as they are: a cos - b sin, b cos + a sin."""
    half = qkv_NXd.shape[2] // 2
    for row in range(qkv_NXd.shape[0]):
        for head in range(qkv_NXd.shape[1]):
            if head < rotated:
                for i in range(half):
                    a, b = qkv_NXd[row, head, i], qkv_NXd[row, head, half + i]
                    out_XNd[head, row, i] = a * cos_Nd[row, i] - b * sin_Nd[row, i]
                    out_XNd[head, row, half + i] = b * cos_Nd[row, half + i] + a * sin_Nd[row, half + i]
            else:
                for i in range(2 * half):
                    out_XNd[head, row, i] = qkv_NXd[row, head, i]


@fast
def gate(gate_up_N2F: Any, out_NF: Any) -> None:
    """silu(gate) * up; ``out`` may be wider."""
    width = gate_up_N2F.shape[1] // 2
    for row in range(out_NF.shape[0]):
        gates, ups, out = gate_up_N2F[row, :width], gate_up_N2F[row, width:], out_NF[row]
        for column in range(width):
            value = gates[column]
            out[column] = value / (np.float32(1) + exp(-value)) * ups[column]


@functools.cache
def attention_of(heads: int, width: int, value_width: int) -> Callable[..., None]:
    """``attend`` for so many heads that share keys and values, and the widths d and e: constants of its code."""

    @fast
    def attend(
        query_HNd: Any,
        keys_KSd: Any,
        values_KSe: Any,
        rows: Any,
        starts: Any,
        slots: Any,
        scaling: Any,
        softcap: Any,
        sinks_H: Any,
        out_NHe: Any,
    ) -> None:
        """Attention of ``rows`` [n] over the slots that each sees, from starts[i] to starts[i + 1], by position.

        ``softcap`` 0: none. ``sinks_H`` is -inf for heads that have none.
        """
        scale, cap = np.float32(scaling), np.float32(softcap)
        longest = 0
        for i in range(len(rows)):
            longest = max(longest, starts[i + 1] - starts[i])
        chances = np.empty((heads, longest), np.float32)
        for i in range(len(rows)):
            row, count, own = rows[i], starts[i + 1] - starts[i], slots.ctypes.data + starts[i] * 4
            for group in range(len(keys_KSd)):
                first = group * heads
                query = query_HNd.ctypes.data + first * query_HNd.strides[0] + row * query_HNd.strides[1]
                keys = keys_KSd.ctypes.data + group * keys_KSd.strides[0]
                values = values_KSe.ctypes.data + group * values_KSe.strides[0]
                out = out_NHe.ctypes.data + row * out_NHe.strides[0] + first * out_NHe.strides[1]
                at, step = chances.ctypes.data, chances.strides[0]
                scores(
                    query, query_HNd.strides[0], keys, keys_KSd.strides[1], own, count, at, step, scale, heads, width
                )
                for head in range(heads):
                    _softmax(chances[head], count, cap, sinks_H[first + head])
                mixed(at, step, values, values_KSe.strides[1], own, count, out, out_NHe.strides[1], heads, value_width)

    return attend  # type: ignore[no-any-return]


@njit(inline="always")
def _softmax(scores: Any, count: int, softcap: Any, sink: Any) -> None:
    """In place, of the first ``count`` scores; a sink takes its share of the mass."""
    if softcap > 0:
        for at in range(count):
            scores[at] = softcap * np.float32(np.tanh(scores[at] / softcap))
    largest = sink
    for at in range(count):
        largest = max(largest, scores[at])
    mass = exp(sink - largest)
    for at in range(count):
        scores[at] = exp(scores[at] - largest)
        mass += scores[at]
    share = np.float32(1) / mass
    for at in range(count):
        scores[at] *= share
