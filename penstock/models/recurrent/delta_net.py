"""Gated delta nets of Qwen3-Next, Qwen3.5, OLMo Hybrid and, with a decay for every channel, Kimi Linear.

They differ in how queries, keys, values and gates are computed from the hidden states: a function for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from penstock.models.recurrent.mixer import Host, StatefulMixer
from penstock.models.recurrent.plan import TreePlan
from penstock.models.recurrent.state import Rows

EPSILON: Final = 1e-6


class Projected(NamedTuple):
    """The projections of the hidden states: the convolution's input, the output's gate, and the raw gates."""

    mixed_NC: Tensor
    """Queries, keys and values side by side."""
    gate_NX: Tensor
    beta_NH: Tensor
    """The write strength before the sigmoid."""
    decay_NX: Tensor
    """The decay before bias and softplus; X is H or H * c."""


Project = Callable[[Any, Tensor], Projected]


def qwen3_next(own: Any, hidden_ND: Tensor) -> Projected:
    """Two projections, whose outputs are ordered by key head."""
    joint = own.fix_query_key_value_ordering(own.in_proj_qkvz(hidden_ND[None]), own.in_proj_ba(hidden_ND[None]))
    query, key, value, gate, beta, decay = (one[0].flatten(1) for one in joint)
    return Projected(torch.cat([query, key, value], dim=-1), gate, beta, decay)


def qwen3_5(own: Any, hidden_ND: Tensor) -> Projected:
    return Projected(
        own.in_proj_qkv(hidden_ND), own.in_proj_z(hidden_ND), own.in_proj_b(hidden_ND), own.in_proj_a(hidden_ND)
    )


def olmo_hybrid(own: Any, hidden_ND: Tensor) -> Projected:
    return Projected(_mixed(own, hidden_ND), own.g_proj(hidden_ND), own.b_proj(hidden_ND), own.a_proj(hidden_ND))


def kimi_linear(own: Any, hidden_ND: Tensor) -> Projected:
    gate = own.g_b_proj(own.g_a_proj(hidden_ND))
    decay = own.forget_gate.f_b_proj(own.forget_gate.f_a_proj(hidden_ND))
    return Projected(_mixed(own, hidden_ND), gate, own.b_proj(hidden_ND), decay)


def _mixed(own: Any, hidden_ND: Tensor) -> Tensor:
    return torch.cat([own.q_proj(hidden_ND), own.k_proj(hidden_ND), own.v_proj(hidden_ND)], dim=-1)


class DeltaNet(StatefulMixer):
    """A gated delta net over slots. ``own`` is transformers' module, without the parts that are held here."""

    def __init__(self, own: Any, host: Host, project: Project) -> None:
        super().__init__(host, own.conv1d)
        self._project = project
        self._activation = ACT2FN[own.activation]
        gates = getattr(own, "forget_gate", own)
        heads = gates.A_log.numel()
        self.register_buffer("rate_H1", -gates.A_log.detach().float().exp().view(heads, 1))
        self.register_buffer("bias_Hc", gates.dt_bias.detach().float().view(heads, -1))
        self._key_width = int(getattr(own, "head_k_dim", 0) or own.head_dim)
        self._keys = int(getattr(own, "key_dim", 0) or own.qkv_dim)
        self._most_beta = 2.0 if getattr(own, "allow_neg_eigval", False) else 1.0
        self.norm = own.norm if hasattr(own, "norm") else own.o_norm
        self.out = own.out_proj if hasattr(own, "out_proj") else own.o_proj
        self.own = own
        # Parts that are held here are removed from ``own``, so that nothing is packed twice.
        for held in ("conv1d", "norm", "o_norm", "out_proj", "o_proj"):
            if hasattr(own, held):
                setattr(own, held, nn.Identity())
        del gates.A_log, gates.dt_bias

    def mix(self, hidden_ND: Tensor, plan: TreePlan) -> Tensor:
        projected = self._project(self.own, hidden_ND)
        output_NHe = self.state.read(self._rows(projected, plan), plan).to(hidden_ND.dtype)
        width = output_NHe.shape[-1]
        normed = self.norm(output_NHe.reshape(-1, width), projected.gate_NX.reshape(-1, width))
        mixed: Tensor = self.out(normed.reshape(len(hidden_ND), -1))
        return mixed

    def _rows(self, projected: Projected, plan: TreePlan) -> Rows:
        mixed_NC: Tensor = self._activation(self.convolution(projected.mixed_NC, plan))
        query, key, value = mixed_NC.float().split([self._keys, self._keys, mixed_NC.shape[1] - 2 * self._keys], dim=1)
        query_NKd, key_NKd = (_unit(one.unflatten(1, (-1, self._key_width))) for one in (query, key))
        rate_H1: Any = self.rate_H1
        bias_Hc: Any = self.bias_Hc
        heads = len(rate_H1)
        return Rows(
            query_NKd * self._key_width**-0.5,
            key_NKd,
            value.unflatten(1, (heads, -1)),
            rate_H1 * F.softplus(projected.decay_NX.float().unflatten(1, (heads, -1)) + bias_Hc),
            self._most_beta * projected.beta_NH.float().sigmoid(),
        )


def _unit(one_NKd: Tensor) -> Tensor:
    return one_NKd * torch.rsqrt(one_NKd.square().sum(dim=-1, keepdim=True) + EPSILON)
