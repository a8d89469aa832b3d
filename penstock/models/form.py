"""The form of a stage's fused layers: all their numbers that are not tensors of the file.

``probe.fuse`` finds by comparison that transformers' layers compute what fused ones do. Its finding for a GGUF file's
layers is kept on disk (``checkpoint.known``). A later start builds bare modules of form and tensors, treats them like
transformers' from there on, and needs no transformers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.gguf import GgufWeights, keep, question, recall, record_of
from penstock.checkpoint.tensors import Listener, Tensors, check_finite, counted
from penstock.files import torch_dtype
from penstock.models.fused import FusedBase, FusedLayer, RMSNorm, Rotary, States, identical, is_silu, sample_of
from penstock.models.linear import read_later
from penstock.models.loader import PassThrough, own_slices
from penstock.models.packing import TableEmbedding
from penstock.models.probe import LENGTH_DEPENDENT, rope_kinds

HEAD: Final = "lm_head"
NORMS: Final = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
"""A fused layer's norm -> its place in an architecture's layer."""


class LayerForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form of one layer. Its activation is silu; shapes and biases are those of its tensors."""

    layer: int
    width: int
    """The width of a head."""
    epsilons: dict[str, float]
    """Place of a norm in the layer -> the epsilon that it adds to the mean square."""
    scoring: dict[str, int | float | None]
    """The arguments of its attention call, as in ``FusedLayer.scoring``."""


class StageForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form of consecutive layers, and of the norm and rotary embedding on their stage."""

    layers: list[LayerForm]
    frequencies: list[float]
    """Radians per position of each pair of a head's numbers."""
    amplitude: float
    """The factor of cosines and sines."""
    epsilon: float | None
    """The epsilon of the norm before the head; None where the stage has no head."""


# ---------------------------------------------------------------------------------------------------------------- found


def form_of(base: nn.Module, causal: Any, norm: nn.Module | None) -> StageForm | None:
    """The form of a stage's fused layers on a CPU, before they are packed; None if they do more than a form can say.

    ``causal`` is the model with nothing but ``norm`` and head in it; without a head ``norm`` is None.
    """
    if not isinstance(base, FusedBase) or not isinstance(base.rotary_emb, Rotary) or not embeds_plainly(base):
        # Anything that a form does not state makes it worthless: better none than one that leaves something out.
        return None
    layers = [form for layer in base.own if (form := layer_form(layer)) is not None]
    if len(layers) < len(base.own):
        return None
    if norm is not None and not (isinstance(norm, RMSNorm) and heads_plainly(causal, norm)):
        return None
    return StageForm(
        layers=layers,
        frequencies=base.rotary_emb.frequencies.tolist(),
        amplitude=base.rotary_emb.amplitude,
        epsilon=None if norm is None else norm.epsilon,
    )


def layer_form(layer: FusedLayer) -> LayerForm | None:
    """The form of one fused layer; None if it has other norms, another activation or sinks."""
    norms = {place: getattr(layer, name) for name, place in NORMS.items() if getattr(layer, name) is not None}
    if not all(isinstance(norm, RMSNorm) for norm in norms.values()) or not is_silu(layer.act):
        return None
    if not all(one is None or type(one) in (int, float) for one in layer.scoring.values()):
        return None
    epsilons = {place: norm.epsilon for place, norm in norms.items()}
    return LayerForm(layer=layer.layer_idx, width=layer.heads.width, epsilons=epsilons, scoring=layer.scoring)


def embeds_plainly(base: FusedBase) -> bool:
    """Whether the stage has no embedding, or one that only looks rows up."""
    embed = base.embed_tokens
    return isinstance(embed, PassThrough) or type(embed) is nn.Embedding or is_plain_table(embed)


def is_plain_table(embed: nn.Module) -> bool:
    """Whether an embedding is a table from which rows are only looked up."""
    return isinstance(embed, TableEmbedding) and embed.is_plain


@torch.inference_mode()
def heads_plainly(causal: Any, norm: RMSNorm) -> bool:
    """Whether a model's logits are its head's numbers: no soft cap, no scale."""
    head, rows = getattr(causal, HEAD, None), sample_of(norm.weight)
    if head is None:
        return False
    behind = getattr(causal, causal.base_model_prefix).norm(rows)
    return identical(causal(inputs_embeds=rows, use_cache=False).logits, head(behind))


# ----------------------------------------------------------------------------------------------------------------- kept


class FormRecord:
    """Where the form of layers [first, last) of a GGUF file is kept on disk, for weights of ``dtype``.

    There is a record only for a file that is ``known``: anything else takes transformers anyway. ``max_model_len``
    counts where rotary embeddings depend on it.
    """

    def __init__(self, checkpoint: Checkpoint, first: int, last: int, dtype: str, max_model_len: int | None) -> None:
        self._file, self._asked = Path(), ""
        self._layers = list(range(first, last))
        pinned = max_model_len if rope_kinds(checkpoint.config) & LENGTH_DEPENDENT else None
        if checkpoint.known is not None and isinstance(checkpoint.weights, GgufWeights) and self._layers:
            self._file = record_of(checkpoint.path, f"layers-{first}-{last}-{dtype}")
            with contextlib.suppress(OSError):  # a file is gone: reading it will say so
                self._asked = question(checkpoint.path, checkpoint.weights.files, first, last, dtype, pinned)

    def read(self) -> StageForm | None:
        """The recorded form; None if there is none for these very files and settings."""
        found = recall(self._file, self._asked, StageForm) if self._asked else None
        return found if found is not None and [one.layer for one in found.layers] == self._layers else None

    def write(self, form: StageForm | None) -> None:
        """Keep a form for later starts; None keeps nothing."""
        if self._asked and form is not None:
            keep(self._file, self._asked, form)


# ---------------------------------------------------------------------------------------------------------------- built


class Logits(msgspec.Struct):
    """The output of a head, as transformers' classes have it."""

    logits: Tensor


class BareModel(nn.Module):
    """A causal language model's parts under an architecture's names, as far as ``StageModel`` asks for them."""

    def __init__(self, prefix: str, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base_model_prefix = prefix
        setattr(self, prefix, base)
        self.lm_head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Logits:
        states: States = getattr(self, self.base_model_prefix)(inputs_embeds=inputs_embeds)
        return Logits(self.lm_head(states.last_hidden_state))


class BareBase(nn.Module):
    """Embedding, layers, norm and rotary embedding; ``probe.fuse`` joins them. ``scorings`` are the layers'."""

    def __init__(self, rotary: Rotary, scorings: list[dict[str, Any]]) -> None:
        super().__init__()
        self.rotary_emb, self.scorings = rotary, scorings


class Builder:
    """Builds modules from a stage's ``tensors``, in ``dtype``. With ``later`` linear weights wait to be packed."""

    def __init__(self, tensors: Tensors, dtype: torch.dtype, file: str, later: bool) -> None:
        self._tensors, self._dtype, self._file, self._later = tensors, dtype, file, later

    def parameter(self, name: str) -> nn.Parameter:
        """A tensor of the file in ``dtype``. Raises ConfigError if it holds NaN or infinity."""
        floats = self._tensors[name][...].to(self._dtype)
        check_finite(self._file, [(name, floats)])
        return nn.Parameter(floats, requires_grad=False)

    def linear(self, place: str) -> nn.Linear:
        """The linear layer at a place, with a bias if the file has one; without its numbers if they are read later."""
        name = f"{place}.weight"
        outputs, inputs = self._tensors[name].get_shape()
        with torch.device("meta"):
            found = nn.Linear(inputs, outputs, bias=False)
            # A zero that is repeated takes no memory; ``read_later`` has the numbers read as the layer is packed.
        if self._later:
            nothing = torch.zeros((), dtype=self._dtype).expand(outputs, inputs)
            found.weight = nn.Parameter(nothing, requires_grad=False)
            read_later(found, name, self._tensors[name], self._file)
        else:
            found.weight = self.parameter(name)
        if f"{place}.bias" in self._tensors:
            found.bias = self.parameter(f"{place}.bias")
        return found

    def embedding(self, name: str) -> nn.Embedding:
        weight = self.parameter(name)
        return nn.Embedding(*weight.shape, _weight=weight, _freeze=True)  # else numbers would be drawn for it

    def norm(self, place: str, epsilon: float) -> RMSNorm:
        return RMSNorm(self.parameter(f"{place}.weight"), epsilon)

    def layer(self, prefix: str, form: LayerForm) -> nn.Module:
        """A decoder layer whose parts are where ``FusedLayer`` looks for them."""
        layer = nn.Module()
        for part in ("self_attn", "mlp"):
            layer.add_module(part, nn.Module())
        places = [
            name.removeprefix(prefix).removesuffix(".weight") for name in self._tensors if name.startswith(prefix)
        ]
        # What is no norm and no bias is a linear layer: a form has nothing else.
        for place in places:
            if place not in form.epsilons and not place.endswith(".bias"):
                self._set(layer, place, self.linear(prefix + place))
        for place, epsilon in form.epsilons.items():
            self._set(layer, place, self.norm(prefix + place, epsilon))
        self._set(layer, "mlp.act_fn", nn.SiLU())
        attention: Any = layer.self_attn
        attention.head_dim, attention.layer_idx = form.width, form.layer
        return layer

    def _set(self, layer: nn.Module, place: str, module: nn.Module) -> None:
        where, _, name = place.rpartition(".")
        layer.get_submodule(where).add_module(name, module)


def build(
    checkpoint: Checkpoint,
    form: StageForm,
    dtype: str,
    on_read: Listener | None,
    files: contextlib.ExitStack | None,
) -> BareModel:
    """The parts of the layers of ``form`` for ``StageModel``; called in place of ``loader.read_module``, see there.

    Raises ConfigError for tensors with NaN or infinity.
    """
    first, last = form.layers[0].layer, form.layers[-1].layer + 1
    with contextlib.ExitStack() as own:
        opened = own if files is None else files
        tensors = opened.enter_context(counted(own_slices(checkpoint, first, last, opened), on_read))
        make = Builder(tensors, torch_dtype(dtype), str(checkpoint.source), later=files is not None)
        return assembled(checkpoint, form, make)


def assembled(checkpoint: Checkpoint, form: StageForm, make: Builder) -> BareModel:
    """The model of ``form``: parts of other stages pass their input through."""
    parts, is_last, is_first = checkpoint.parts, form.epsilon is not None, form.layers[0].layer == 0
    embed: Any = PassThrough()
    head: Any = PassThrough()
    tied = is_last and bool(checkpoint.config.tie_word_embeddings)
    if is_first or tied:
        # A last stage needs the embedding's numbers for a tied head, even if it embeds no tokens.
        embed = make.embedding(f"{parts.base}.{parts.embed}.weight")
    if is_last:
        head = tied_head(embed) if tied else make.linear(HEAD)
    layers = nn.ModuleList(PassThrough() for _ in range(checkpoint.num_layers))
    for one in form.layers:
        layers[one.layer] = make.layer(f"{parts.base}.{parts.layers}.{one.layer}.", one)
    base = BareBase(Rotary(torch.tensor(form.frequencies), form.amplitude), [one.scoring for one in form.layers])
    base.add_module(parts.embed, embed if is_first else PassThrough())
    base.add_module(parts.layers, layers)
    base.add_module(parts.norm, PassThrough())
    if form.epsilon is not None:
        base.add_module(parts.norm, make.norm(f"{parts.base}.{parts.norm}", form.epsilon))
    return BareModel(parts.base, base, head)


def tied_head(embed: nn.Embedding) -> nn.Linear:
    """A head whose weight is the embedding's own parameter, by which ``packing`` sees that they are tied."""
    with torch.device("meta"):
        head = nn.Linear(embed.embedding_dim, embed.num_embeddings, bias=False)
    head.weight = embed.weight
    return head
