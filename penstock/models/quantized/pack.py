"""Packs a stage's linear layers, embedding and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.core import ConfigError
from penstock.models.quantized import linear as int4
from penstock.models.quantized import linear as int8
from penstock.models.quantized.linear import (
    FloatHead,
    FloatLinear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    SlicedLinear,
    TiedHead,
    gains,
    rounded,
    works,
)

# ---------------------------------------------------------------------------------------------------------------- table
# An embedding with int8 rows, and a head that multiplies by the same rows, so that tied ones are held once.


class Lookup(Protocol):
    """A table with a row for every token."""

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these tokens, float32: [..] -> [.., D]."""


class Table(nn.Module):
    """int8 rows for every token, [V, D], with a scale for each group of a row."""

    values: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        found = rounded(weight.detach())
        self._width, self._group = weight.shape[1], found.group
        self.register_buffer("values", found.values)
        self.register_buffer("scales", found.scales.half())

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these tokens, float32: [..] -> [.., D]."""
        scales = self.scales[ids].float().repeat_interleave(self._group, -1)
        return (self.values[ids] * scales)[..., : self._width]


class TableEmbedding(nn.Module):
    """Drop-in for an ``nn.Embedding`` or a derived class: gemma's scales the rows that it has looked up."""

    def __init__(self, table: Lookup, embedding: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self._dtype = embedding.weight.dtype
        self._derived = None if type(embedding) is nn.Embedding else embedding
        # The class may stay, for what it does to the rows, but its own table is freed.
        embedding.weight = nn.Parameter(embedding.weight[:0], requires_grad=False)
        embedding.padding_idx = None

    @property
    def is_plain(self) -> bool:
        """Whether it only looks rows up."""
        return self._derived is None

    def forward(self, ids: Tensor) -> Tensor:
        """[..] -> [.., D]"""
        rows = self.table.rows(ids).to(self._dtype)
        if self._derived is None:
            return rows
        # The derived class looks the rows up once more: its weight is what has been found, row by row.
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        found: Tensor = functional_call(self._derived, {"weight": rows.flatten(0, -2)}, (places,))
        return found


class TableHead(Int8Linear):
    """Drop-in for the head's ``nn.Linear``; an embedding can read the same rows, so that they are held once.

    The rows are rounded as in a ``Table``, whatever the file has, so that an embedding on another stage gives the same.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, rounded(linear.weight.detach()))

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits [.., D] -> [.., V], left in float32."""
        return self.products(hidden)


# ----------------------------------------------------------------------------------------------------------------- pack
# Replaces a stage's linear layers by packed ones in the requested format, one after another.


def pack(module: nn.Module, quantization: str, *, exact: bool = False) -> None:
    """Replace every linear layer under ``module``, in place; ``quantization`` names the format, "none" for floats.

    Whole numbers are always ``exact``: a row's result does not depend on the rows beside it.
    """
    floats: Callable[[nn.Linear], nn.Module] = FloatLinear if exact else packed_floats
    replace_linears(module, QUANTIZED.get(quantization, floats))


def pack_sliced(module: nn.Module, quantization: str) -> None:
    """``pack`` for a device other than the CPU, which computes floats: "none" changes nothing."""
    if quantization != "none":
        replace_linears(module, SLICED[quantization])


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace every linear layer under ``module``, in place, each of whose weights is freed before the next one."""
    for name, child in module.named_children():
        # Subclasses of Linear may compute something else, so only the class itself is replaced.
        if type(child) is nn.Linear:
            setattr(module, name, make(child))
        else:
            replace_linears(child, make)


def usable(quantization: str) -> bool:
    """Whether this processor computes with weights of this format."""
    return quantization == "none" or works()


def int4_or_int8(linear: nn.Linear) -> nn.Module:
    """An int4 layer, or an int8 one for a shape that int4's kernel cannot compute."""
    return Int4Linear(linear) if int4.fits(linear) else Int8Linear(linear)


def packed_floats(linear: nn.Linear) -> nn.Module:
    """The layer packed if that makes it faster, else unchanged."""
    return PackedLinear(linear) if gains(linear) else linear


def sliced_int8(linear: nn.Linear) -> nn.Module:
    return SlicedLinear(linear, int8.in_eight_bits(linear))


def sliced_int4(linear: nn.Linear) -> nn.Module:
    return SlicedLinear(linear, int4.in_four_bits(linear)) if int4.fits(linear) else sliced_int8(linear)


QUANTIZED: Final[dict[str, Callable[[nn.Linear], nn.Module]]] = {"int8": Int8Linear, "int4": int4_or_int8}
SLICED: Final[dict[str, Callable[[nn.Linear], nn.Module]]] = {"int8": sliced_int8, "int4": sliced_int4}


def share_tied(causal: Any, base: Any, embed: str) -> None:
    """Let the head compute with the embedding's own weight, in place, if a stage has both and they are tied."""
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    if (
        isinstance(embedding, nn.Embedding)
        and type(head) is nn.Linear
        and embedding.weight is head.weight
        and gains(head)
    ):
        causal.set_output_embeddings(TiedHead(head))


def exact_ends(causal: Any, base: Any, embed: str) -> None:
    """Replace a stage's head, if it has one, by a ``FloatHead``, in place; a tied embedding reads its rows."""
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    if type(head) is nn.Linear:
        exact = FloatHead(head)
        causal.set_output_embeddings(exact)
        if isinstance(embedding, nn.Embedding) and embedding.weight is head.weight:
            setattr(base, embed, TableEmbedding(exact, embedding))


def quantize_ends(causal: Any, base: Any, embed: str, *, tied: bool, sliced: bool = False) -> None:
    """Replace a stage's embedding (``base``'s ``embed``) and head, as far as it has them, by int8 ones, in place.

    Tied ones share their rows. A tied head computes the same on every stage, with or without the embedding beside it.
    ``sliced`` ones are for a device other than the CPU.
    """
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    quantized: Any = None
    if isinstance(head, nn.Linear) and sliced:
        # Tied rows are rounded as in a ``Table``, as those of ``TableHead``.
        whole = int8.rounded(head.weight.detach()) if tied else int8.in_eight_bits(head)
        quantized = SlicedLinear(head, whole)
        causal.set_output_embeddings(quantized)
    elif isinstance(head, nn.Linear):
        quantized = TableHead(head) if tied else Int8Linear(head)
        causal.set_output_embeddings(quantized)
    if isinstance(embedding, nn.Embedding):
        weight = embedding.weight
        shared = tied and quantized is not None and head.weight is weight
        table = quantized if shared else Table(weight)
        setattr(base, embed, TableEmbedding(table, embedding))


def check_covered(layers: nn.Module, quantization: str) -> None:
    """Raise ConfigError if the layers have weights outside of linear layers, as experts do."""
    for name, weight in layers.named_parameters():
        if weight.dim() > 1:
            raise ConfigError(
                f"quantization: {quantization} is for linear layers, and {name} is no part of one; use none"
            )
