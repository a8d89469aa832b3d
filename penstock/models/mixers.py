"""Mixers that carry a state over slots: gated delta nets, Mamba-2 and short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.checkpoint.architectures import refusal
from penstock.models.fused import agree, sample_of, widened
from penstock.models.loader import quiet
from penstock.models.recurrent import Rows, SlotArrays, State, TreePlan
from penstock.stage.visibility import BatchView, RequestView

# ---------------------------------------------------------------------------------------------------------- convolution
# A causal depthwise convolution along a row's path: a row gathers the inputs of its nearest ancestors.


class TreeConvolution(nn.Module):
    """Made from a ``Conv1d`` with one channel per group. A slot stores its row's input [C]."""

    def __init__(self, conv: Any, capacity: int) -> None:
        super().__init__()
        self.slots = SlotArrays(capacity)
        self.register_buffer("taps_KC", conv.weight.detach()[:, 0].T.contiguous())
        self.register_buffer("bias_C", None if conv.bias is None else conv.bias.detach())

    def forward(self, input_NC: Tensor, plan: TreePlan) -> Tensor:
        """[N, C] -> [N, C]"""
        taps_KC: Any = self.taps_KC
        self.slots.put("input", plan.slots_N, input_NC)
        output_NC = input_NC * taps_KC[-1]
        if len(taps_KC) > 1:
            # The parent comes first here, but last but one among the taps, whose last is the row's own: hence the flip.
            # Above a text's first row the entries are zeros, which is the convolution's padding.
            above_NKC = self.slots.get("input", plan.ancestors(len(taps_KC) - 1))
            output_NC = output_NC + (above_NKC * taps_KC[:-1].flip(0)).sum(dim=1)
        return output_NC if self.bias_C is None else output_NC + self.bias_C


# ---------------------------------------------------------------------------------------------------------------- mixer
# The base of the modules that replace a layer's state-carrying part.


class MixerGroup:
    """The mixers of a stage, and what they share: the present batch, and the number of slots."""

    def __init__(self, capacity: int, device: torch.device, new_state: Callable[[int], State]) -> None:
        """``new_state`` makes a layer's state for a number of slots."""
        self.capacity = capacity
        self.device = device
        self._new_state = new_state
        self.members: list[Mixer] = []
        self._plan: TreePlan | None = None
        self._begun: set[int] = set()
        """Requests that have had rows and have not ended."""

    def like(self, capacity: int) -> MixerGroup:
        """Make another group, without mixers, whose states are of the same kind."""
        return MixerGroup(capacity, self.device, self._new_state)

    def begin(self, view: BatchView) -> None:
        """Set the batch whose rows come next."""
        if not self.members:
            return
        self._plan = TreePlan(view, self.capacity, self.device)
        self._begun.update(one.request for one in view.views)
        self._begun.difference_update(view.closed)
        for mixer in self.members:
            mixer.forget(view.closed)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` slots. Slots that exist keep their contents."""
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for mixer in self.members:
            for slots in mixer.slots:
                slots.grow(capacity)

    @property
    def plan(self) -> TreePlan:
        assert self._plan is not None, "a batch has begun"
        return self._plan

    def new_state(self) -> State:
        return self._new_state(self.capacity)

    @property
    def bytes(self) -> int:
        """Bytes of everything that is stored by slot."""
        return sum(mixer.bytes for mixer in self.members)

    def zero(self) -> None:
        """Reset everything, as if no row had ever come."""
        for mixer in self.members:
            for slots in mixer.slots:
                slots.zero()
            mixer.forget(tuple(self._begun))
        self._begun.clear()


class Mixer(nn.Module):
    """Called like the transformers module that it replaces; ``calls`` counts the calls."""

    def __init__(self, group: MixerGroup) -> None:
        super().__init__()
        self.group = group
        self.calls = 0

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """[1, N, D] -> [1, N, D]"""
        self.calls += 1
        return self.mix(hidden_states[0], self.group.plan)[None]

    def mix(self, hidden_ND: Tensor, plan: TreePlan) -> Tensor:
        """Compute the rows of the present batch: [N, D] -> [N, D]."""
        raise NotImplementedError

    @property
    def slots(self) -> list[SlotArrays]:
        """All arrays that are stored by slot."""
        raise NotImplementedError

    def forget(self, requests: Sequence[int]) -> None:
        """Drop the state of requests that have ended."""

    @property
    def bytes(self) -> int:
        return sum(slots.bytes for slots in self.slots)


class StatefulMixer(Mixer):
    """A mixer with a short convolution before its state."""

    def __init__(self, group: MixerGroup, conv: Any) -> None:
        super().__init__(group)
        self.state = group.new_state()
        self.convolution = TreeConvolution(conv, group.capacity)

    @property
    def slots(self) -> list[SlotArrays]:
        return [self.convolution.slots, self.state.slots]

    def forget(self, requests: Sequence[int]) -> None:
        self.state.forget(requests)


# ------------------------------------------------------------------------------------------------------------ delta net
# Gated delta nets of Qwen3-Next, Qwen3.5, OLMo Hybrid and, with a decay for every channel, Kimi Linear.
#
# They differ in how queries, keys, values and gates are computed from the hidden states: a function for each.

EPSILON: Final = 1e-6
"""Added to the squared length of a query or key, so that nothing is divided by 0. transformers' ``l2norm`` has the
same."""


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

    def __init__(self, own: Any, group: MixerGroup, project: Project) -> None:
        super().__init__(group, own.conv1d)
        self._project = project
        self._activation = activation_of(own)
        gates = getattr(own, "forget_gate", own)
        heads = gates.A_log.numel()
        self.register_buffer("rate_H1", -gates.A_log.detach().float().exp().view(heads, 1))
        self.register_buffer("bias_Hc", gates.dt_bias.detach().float().view(heads, -1))
        self._key_width = int(getattr(own, "head_k_dim", 0) or own.head_dim)
        self._keys = int(getattr(own, "key_dim", 0) or own.qkv_dim)
        # A strength of up to 2 lets the state's eigenvalues be negative (``allow_neg_eigval``).
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
    """Queries or keys of length 1."""
    return one_NKd * torch.rsqrt(one_NKd.square().sum(dim=-1, keepdim=True) + EPSILON)


# --------------------------------------------------------------------------------------------------------------- mamba2
# Mamba-2 (arXiv 2405.21060) of Bamba, Granite 4, Nemotron-H and Falcon-H1: a decaying state, no delta rule.


class Mamba2(StatefulMixer):
    """A Mamba-2 layer over slots. B are the keys, C the queries, dt x the values, and dt A the log decays."""

    def __init__(self, own: Any, group: MixerGroup) -> None:
        super().__init__(group, own.conv1d)
        self._activation = activation_of(own)
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
        # The projection holds the gate, the convolution's channels and the steps side by side.
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


# ---------------------------------------------------------------------------------------------------- short convolution
# Gated short convolutions of LFM2, whose whole state is a few inputs.


class ShortConvolution(Mixer):
    """LFM2's layer: its input times one gate goes through the convolution, and what comes out times another gate."""

    def __init__(self, own: Any, group: MixerGroup) -> None:
        super().__init__(group)
        self.convolution = TreeConvolution(own.conv, group.capacity)
        self.in_proj, self.out_proj = own.in_proj, own.out_proj

    @property
    def slots(self) -> list[SlotArrays]:
        return [self.convolution.slots]

    def mix(self, hidden_ND: Tensor, plan: TreePlan) -> Tensor:
        before_ND, after_ND, input_ND = self.in_proj(hidden_ND).chunk(3, dim=-1)
        mixed: Tensor = self.out_proj(after_ND * self.convolution(before_ND * input_ND, plan))
        return mixed


# -------------------------------------------------------------------------------------------------------------- install
# Replaces transformers' state-carrying modules by mixers over slots, if a sample shows that both compute the same.

ROWS: Final = 5
"""How many rows the sample has: more than a convolution reaches back."""

MIXERS: Final[Mapping[str, Callable[[Any, MixerGroup], Mixer]]] = {
    "Qwen3NextGatedDeltaNet": partial(DeltaNet, project=qwen3_next),
    "Qwen3_5GatedDeltaNet": partial(DeltaNet, project=qwen3_5),
    "Qwen3_5MoeGatedDeltaNet": partial(DeltaNet, project=qwen3_5),
    "OlmoHybridGatedDeltaNet": partial(DeltaNet, project=olmo_hybrid),
    "KimiLinearDeltaAttention": partial(DeltaNet, project=kimi_linear),
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
}
"""Name of transformers' class -> mixer."""


@torch.inference_mode()
def activation_of(own: Any) -> Callable[[Tensor], Tensor]:
    """The activation that transformers' module ``own`` names."""
    from transformers.activations import ACT2FN

    found: Callable[[Tensor], Tensor] = ACT2FN[own.activation]
    return found


def install(config: Any, layers: Sequence[nn.Module], group: MixerGroup) -> None:
    """Replace the mixers of these layers, in place. Raises ConfigError if one computes something unexpected."""
    for layer in layers:
        for name, own in list(layer.named_children()):
            if make := MIXERS.get(type(own).__name__):
                check_alike(config, make, own, group)
                mixer = make(own, group)
                group.members.append(mixer)
                setattr(layer, name, mixer)


def check_alike(config: Any, make: Callable[[Any, MixerGroup], Mixer], own: Any, group: MixerGroup) -> None:
    """Raise ConfigError unless a mixer gives the same results as ``own`` for some sample rows, both in float32."""
    wide = widened(own)
    weight = next(one for one in wide.parameters() if one.dim() == 2 and one.shape[1] == config.hidden_size)
    trial = group.like(min(ROWS, group.capacity))
    sample = sample_of(weight, trial.capacity)
    with quiet():  # it would advise to install kernels, and is about to be replaced
        expected = wide(hidden_states=sample)
    mixer = make(wide, trial)
    trial.members.append(mixer)
    trial.begin(_chain(trial.capacity))
    if not agree(mixer(sample), expected):
        raise refusal(config, f"transformers' {type(own).__name__} computes something that this release does not know")


def _chain(count: int) -> BatchView:
    """A batch of one request with ``count`` rows in the first slots."""
    order = np.arange(count)
    request = RequestView(0, order, order, order, np.tri(count, dtype=bool))
    return BatchView(order * 0, order, order, order, order * 0, [request], order - 1)
