"""Mamba-2 (arXiv 2405.21060) of Bamba, Granite 4, Nemotron-H and Falcon-H1: a decaying state, no delta rule."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from penstock.models.recurrent.mixer import Host, StatefulMixer
from penstock.models.recurrent.plan import TreePlan
from penstock.models.recurrent.state import Rows


class Mamba2(StatefulMixer):
    """A Mamba-2 layer over slots. B are the keys, C the queries, dt x the values, and dt A the log decays."""

    def __init__(self, own: Any, host: Host) -> None:
        super().__init__(host, own.conv1d)
        self._activation = ACT2FN[own.activation]
        self._least_step, self._most_step = own.time_step_limit
        self._groups, self._state_width = int(own.n_groups), int(own.ssm_state_size)
        self._width, self._heads = int(own.intermediate_size), int(own.num_heads)
        self._scale = float(getattr(own, "ssm_in_multiplier", 1.0))
        self.register_buffer("scales_X", own.mup_vector[0, 0] if hasattr(own, "mup_vector") else None)
        self.register_buffer("rate_H", -own.A_log.detach().float().exp())
        self.register_buffer("bias_H", own.dt_bias.detach())
        self.register_buffer("skip_H1", own.D.detach()[:, None])
        self.in_proj, self.out_proj = own.in_proj, own.out_proj
        self.norm = None if isinstance(own.norm, nn.Identity) else own.norm

    def mix(self, hidden_ND: Tensor, plan: TreePlan) -> Tensor:
        projected_NX = self.in_proj(hidden_ND * self._scale)
        if self.scales_X is not None:
            projected_NX = projected_NX * self.scales_X
        between = projected_NX.shape[1] - self._width - self._heads
        gate_NX, mixed_NC, step_NH = projected_NX.split([self._width, between, self._heads], dim=1)
        input_NHe, rows = self._rows(self._activation(self.convolution(mixed_NC, plan)), step_NH)
        skip_H1: Any = self.skip_H1
        read_NX = (self.state.read(rows, plan) + skip_H1 * input_NHe).flatten(1)
        normed = read_NX * F.silu(gate_NX) if self.norm is None else self.norm(read_NX, gate_NX)
        mixed: Tensor = self.out_proj(normed.to(hidden_ND.dtype))
        return mixed

    def _rows(self, mixed_NC: Tensor, step_NH: Tensor) -> tuple[Tensor, Rows]:
        """The input of every head, and the rows as the state takes them."""
        rate_H: Any = self.rate_H
        keys = self._groups * self._state_width
        input_NX, key, query = mixed_NC.float().split([self._width, keys, keys], dim=1)
        step_NH = F.softplus(step_NH + self.bias_H).clamp(self._least_step, self._most_step).float()
        input_NHe = input_NX.unflatten(1, (self._heads, -1))
        query_NKd, key_NKd = (one.unflatten(1, (self._groups, -1)) for one in (query, key))
        value_NHe = input_NHe * step_NH[..., None]
        return input_NHe, Rows(query_NKd, key_NKd, value_NHe, (rate_H * step_NH)[..., None])
