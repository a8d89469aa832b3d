"""Fused decoder layers of llama's form: joined linear layers, norms, rotary embeddings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.attention import attend
from penstock.models.linear import is_read_later, join
from penstock.models.shares import ALONE, cut_of

# -------------------------------------------------------------------------------------------------------------- linears
# Linear layers that read the same input, as one layer whose weight has the rows of them all.


class SideBySide(nn.Module):
    """The concatenated outputs of linear layers that are not (yet) joined."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., sum of all out]"""
        return torch.cat([linear(hidden) for linear in self.linears], dim=-1)


def joined(beside: SideBySide) -> nn.Module:
    """One linear layer with the outputs of all layers in ``beside``, if they are plain; else ``beside`` itself."""
    linears: list[Any] = list(beside.linears)
    if not all(type(linear) is nn.Linear for linear in linears):
        return beside
    with torch.device("meta"):
        whole = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False)
    weights = [linear.weight for linear in linears]
    # Samples of weights that are read later are not worth copying.
    later = all(map(is_read_later, linears))
    weight = weights[0].new_zeros(()).expand(whole.weight.shape) if later else torch.cat(weights)
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        whole.bias = nn.Parameter(torch.cat([bias_of(linear) for linear in linears]), requires_grad=False)
    join(whole, linears)
    return whole


def bias_of(linear: Any) -> Tensor:
    """The bias of a linear layer, [outputs]; zeros for one without."""
    found: Tensor = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
    return found


# --------------------------------------------------------------------------------------------------------------- rotary
# Rotary embeddings of a batch, laid out once for all layers, and applied to a layer's queries and keys at once.
#
# Width d of a head, in halves:  (a, b) * (cos, cos)  +  (b, a) * (-sin, sin)
# Values take part as a * 1 + b * 0, so that keys and values stay side by side.


class Rotation(NamedTuple):
    """Factors for each row's heads (queries, keys and values in this order): [N, heads, d]."""

    straight: Tensor
    swapped: Tensor

    def apply(self, qkv_NXd: Tensor) -> Tensor:
        """The heads with queries and keys rotated, and values unchanged."""
        half = qkv_NXd.shape[-1] // 2
        # Rolling by half a width swaps a and b; ``swapped`` has the signs.
        return torch.addcmul(qkv_NXd * self.straight, qkv_NXd.roll(half, -1), self.swapped)


def rotation_of(cos_1Nd: Tensor, sin_1Nd: Tensor, rotated: int, values: int) -> Rotation:
    """The factors for ``rotated`` heads, from an architecture's cosines and sines, and for ``values`` heads beside."""
    cos_Nd, sin_Nd = cos_1Nd[0], sin_1Nd[0]
    rows, width = cos_Nd.shape
    straight = cos_Nd.new_ones(rows, rotated + values, width)
    straight[:, :rotated] = cos_Nd[:, None]
    swapped = sin_Nd.new_zeros(rows, rotated + values, width)
    swapped[:, :rotated] = sin_Nd[:, None]
    # The first half of a head gets b times -sin, the second half a times sin.
    swapped[:, :rotated, : width // 2].neg_()
    return Rotation(straight, swapped)


class Rotary(nn.Module):
    """Cosines and sines of positions, as transformers' modules of one axis give them.

    A pair of a head's numbers turns by ``frequencies`` [d / 2] radians per position.
    """

    frequencies: Tensor

    def __init__(self, frequencies: Tensor, amplitude: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.amplitude = amplitude

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[1, N] -> cosines and sines, [1, N, d] each, in the format of ``hidden``"""
        # Both halves of a head turn by the same angles: number i and number i + d / 2 are a pair.
        turns_1Nd = (position_ids[..., None].float() * self.frequencies).repeat(1, 1, 2)
        cos_1Nd, sin_1Nd = turns_1Nd.cos() * self.amplitude, turns_1Nd.sin() * self.amplitude
        return cos_1Nd.to(hidden.dtype), sin_1Nd.to(hidden.dtype)


POSITIONS: Final = (0, 1, 2, 1000, 123456)
"""Positions at which a rotary embedding is compared with ``Rotary``. The far ones show how angles are rounded."""


@torch.no_grad()
def rotary(theirs: Any) -> nn.Module:
    """A ``Rotary`` that gives the same bits as an architecture's own embedding, or else that itself."""
    frequencies, amplitude = getattr(theirs, "inv_freq", None), getattr(theirs, "attention_scaling", 1.0)
    if isinstance(theirs, Rotary) or not isinstance(frequencies, Tensor) or type(amplitude) not in (int, float):
        return theirs  # type: ignore[no-any-return]
    own, positions_1N = (
        Rotary(frequencies.detach().float(), float(amplitude)),
        frequencies.new_tensor([POSITIONS]).long(),
    )
    rows = frequencies.new_empty(0, dtype=torch.float32)
    alike = all(map(identical, own(rows, positions_1N), theirs(rows, positions_1N)))
    return own if alike else theirs


# ----------------------------------------------------------------------------------------------------------------- base
# A stage's layers without the base model of their architecture around them.


class States(NamedTuple):
    """The output of a base model, as transformers' classes have it."""

    last_hidden_state: Tensor


class FusedBase(nn.Module):
    """Replaces the base model, and is called like it; the norm behind the layers is not included.

    ``layers`` has an entry for every layer of the model, as in the base model; ``own`` are the stage's.
    """

    def __init__(self, embed: nn.Module, rotary: nn.Module, layers: nn.ModuleList, own: Sequence[Any]) -> None:
        super().__init__()
        self.embed_tokens = embed
        self.rotary_emb = rotary
        self.layers = layers
        self.own = tuple(own)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor,
        **options: Any,
    ) -> States:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return States(self.through(hidden, self.turned(hidden, position_ids)))

    def turned(self, hidden: Tensor, position_ids: Tensor) -> Any:
        """The result of ``rotation`` for these positions; the tensor says in which format, and on which device."""
        return self.rotation(*self.rotary_emb(hidden, position_ids))

    def through(self, hidden: Tensor, rotation: Any) -> Tensor:
        """Run the rows through the stage's layers: [1, N, D] -> [1, N, D]."""
        for layer in self.own:
            hidden = layer(hidden, rotation)
        return hidden

    def rotation(self, cos_1Nd: Tensor, sin_1Nd: Tensor) -> Any:
        """The factors of a batch's rotary embedding in the form that the layers take."""
        heads = self.own[0].heads
        return rotation_of(cos_1Nd, sin_1Nd, heads.rotated, heads.groups)


# ------------------------------------------------------------------------------------------------------------ agreement
# Whether two modules compute the same, tried on a few rows in float32, whatever the format of their weights.
#
# A narrow type cannot tell: 64 roundings of bfloat16 are half of the largest number, so that a layer whose residual is
# scaled by .7 would look like one whose residual is not. In float32 they are a hundred-thousandth.

SAMPLE_ROWS: Final = 3
"""Rows that are computed both ways. One could hide that a fused operation mixes rows."""
ROUNDINGS: Final = 64
"""Roundings by which two orders of the same operations may differ, each relative to the largest number they give. A sum
may be added up in any order; a wrong operation differs by far more."""
OF_THE_SUM: Final = 4
"""Roundings of a residual's own numbers, beside those of what is added to it. Adding them rounds the sum, too."""

Module = TypeVar("Module", bound=nn.Module)


def sample_of(weight: Tensor, rows: int = SAMPLE_ROWS) -> Tensor:
    """Some rows that a weight [.., D] can be applied to: [1, rows, D], the same every time."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, rows, weight.shape[-1], generator=generator)
    return sample.to(weight.device, weight.dtype)


def widened(module: Module) -> Module:
    """A copy of ``module`` whose weights are float32. What is no weight, as its configuration, is shared."""
    shared: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            wide = tensor.detach().float()
            shared[id(tensor)] = nn.Parameter(wide, False) if isinstance(tensor, nn.Parameter) else wide
    for part in module.modules():
        # ``stored`` (``linear.stored_rows``) leads to open files, a configuration to nothing that a copy could change.
        shared |= {id(vars(part)[name]): vars(part)[name] for name in ("config", "stored") if name in vars(part)}
    return copy.deepcopy(module, shared)


def in_float32(module: Module) -> Module:
    """``module`` itself where all its weights are float32, else ``widened``: to be run, and left as it is."""
    floats = (one for one in (*module.parameters(), *module.buffers()) if one.is_floating_point())
    return module if all(one.dtype == torch.float32 for one in floats) else widened(module)


def agree(found: Tensor, expected: Tensor, residual: Tensor | None = None) -> bool:
    """Whether two results in float32 differ by no more than rounding.

    Both may be sums with a ``residual`` of their shape; what counts then is what was added to it, since a large
    residual would hide it. On torch's meta device, where tensors hold no numbers, shapes decide. Raises TypeError for
    another type than float32, in which rounding hides what is to be seen.
    """
    if found.dtype != torch.float32 or expected.dtype != torch.float32:
        raise TypeError(f"results to be compared are {found.dtype} and {expected.dtype}; they have to be torch.float32")
    alike: bool = found.shape == expected.shape
    if not alike or expected.is_meta:
        return alike
    added = expected if residual is None else expected - residual
    epsilon = torch.finfo(torch.float32).eps
    allowed = ROUNDINGS * epsilon * float(added.abs().max()) + OF_THE_SUM * epsilon * expected.abs()
    if not math.isfinite(float(allowed.max())):  # weights that are no numbers, which the stage's first row shows
        return False
    return bool(((found - expected).abs() <= allowed).all())


def identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; on torch's meta device shapes decide."""
    alike: bool = one.shape == other.shape
    return alike and (one.is_meta or torch.equal(one, other))


# ---------------------------------------------------------------------------------------------------------------- norms
# RMS norms as one operation in place of six.


class RMSNorm(nn.Module):
    """``hidden`` over the root of its mean square, times ``weight``. With D numbers x in a row and epsilon e:

      x / sqrt(sum(x^2) / D + e) * weight  =  x * (weight * sqrt(D)) / hypot(norm(x), sqrt(D * e))

    The right side takes four operations, and half the time of torch's own. Narrower types are widened for it. A GPU has
    one kernel for torch's own.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        width = len(weight)
        self.weight, self.epsilon = weight.detach(), epsilon
        # Plain attributes, not buffers: looking a buffer up takes as long as multiplying by it.
        self.scaled = weight.detach().float() * width**0.5
        self.least = self.scaled.new_tensor((width * epsilon) ** 0.5)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RMSNorm:
        # torch's hook for what moves a module, which knows only parameters and buffers.
        super()._apply(fn, recurse)
        self.scaled, self.least, self.weight = fn(self.scaled), fn(self.least), fn(self.weight)
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., D]"""
        if hidden.is_cuda and hidden.dtype == self.weight.dtype:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        normed = (hidden * self.scaled).div_(torch.hypot(length, self.least))
        return normed if hidden.dtype == torch.float32 else normed.to(hidden.dtype)


@torch.no_grad()
def rms_norm(norm: Any) -> nn.Module:
    """A module that computes the same as an architecture's own ``norm``, up to rounding, or else ``norm`` itself."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return norm  # type: ignore[no-any-return]
    found, sample = RMSNorm(weight, epsilon), sample_of(weight).float()
    return found if agree(found(sample), in_float32(norm)(sample)) else norm


# ---------------------------------------------------------------------------------------------------------------- layer
# A decoder layer of llama's form, whatever the architecture calls it, with half the operations.
#
# Queries, keys and values come from one product, as do the feed-forward's gate and its input. An architecture's own
# layer has this form if it has these parts and no others, and computes the same.

PARTS: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS: Final = {"q_norm", "k_norm"}
"""Norms over the width of each query and key head, as in qwen3."""
MLP_PARTS: Final = {"gate_proj", "up_proj", "down_proj", "act_fn"}


SAMPLES: Final = 33
"""Numbers on which an activation is tried. They lie half a unit apart, from -8 to 8."""


def is_silu(act: Any) -> bool:
    """Whether an activation is x / (1 + e^-x), judged by its values on a sample."""
    sample = torch.linspace(-8, 8, SAMPLES)
    return agree(act(sample), F.silu(sample))


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
    """A decoder layer of llama's form whose queries, keys and values, and whose gate and input, are one product each.

    ``scoring`` holds the arguments of the layer's attention: its scale, and a window where there is one.
    """

    def __init__(self, layer: Any, scoring: dict[str, Any]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.heads = Heads(attention)
        self.scoring = scoring
        self.cut = cut_of(ALONE, attention, mlp)
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
        # Keys and values stay side by side, so that a layer's arenas can take both with one copy.
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
    """The names of a module's children."""
    return {name for name, _ in module.named_children()}
