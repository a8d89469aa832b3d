"""Replaces a stage's linear layers by packed ones in the requested format, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from penstock.core import ConfigError
from penstock.models.quantization import int4, int8
from penstock.models.quantization.floats import FloatHead, FloatLinear, PackedLinear, TiedHead, gains
from penstock.models.quantization.int4 import Int4Linear
from penstock.models.quantization.int8 import Int8Linear
from penstock.models.quantization.sliced import SlicedLinear
from penstock.models.quantization.table import Table, TableEmbedding, TableHead
from penstock.models.quantization.whole import works


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
