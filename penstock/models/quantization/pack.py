"""Replaces a stage's linear layers, one after another, by packed ones in the format that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from penstock.core import ConfigError
from penstock.models.quantization import int4
from penstock.models.quantization.floats import PackedLinear, TiedHead, gains
from penstock.models.quantization.int4 import Int4Linear
from penstock.models.quantization.int8 import Int8Linear
from penstock.models.quantization.table import Table, TableEmbedding, TableHead
from penstock.models.quantization.whole import works


def pack(module: nn.Module, quantization: str) -> None:
    """Replace every linear layer under ``module``, in place: by the format of that name, or "none" for floats.

    A layer's plain weight is given up before the next one is packed.
    """
    make = QUANTIZED.get(quantization, packed_floats)
    for name, child in module.named_children():
        # Subclasses of Linear may compute something else, so only the class itself is replaced.
        if type(child) is nn.Linear:
            setattr(module, name, make(child))
        else:
            pack(child, quantization)


def usable(quantization: str) -> bool:
    """Whether this processor computes with weights of this format."""
    return quantization == "none" or works()


def int4_or_int8(linear: nn.Linear) -> nn.Module:
    """int8 for a shape that the kernel of int4 does not take."""
    return Int4Linear(linear) if int4.fits(linear) else Int8Linear(linear)


def packed_floats(linear: nn.Linear) -> nn.Module:
    """Where that makes it faster."""
    return PackedLinear(linear) if gains(linear) else linear


QUANTIZED: Final[dict[str, Callable[[nn.Linear], nn.Module]]] = {"int8": Int8Linear, "int4": int4_or_int8}


def share_tied(causal: Any, base: Any, embed: str) -> None:
    """Have the head compute with the embedding's own weight, in place, where a stage has both and they are tied."""
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    if (
        isinstance(embedding, nn.Embedding)
        and type(head) is nn.Linear
        and embedding.weight is head.weight
        and gains(head)
    ):
        causal.set_output_embeddings(TiedHead(head))


def quantize_ends(causal: Any, base: Any, embed: str, *, tied: bool) -> None:
    """Replace the embedding (``base``'s ``embed``) and the head of a stage that has them by int8, in place.

    Tied ones share their rows. A tied head computes alike on every stage, whether its embedding is there or not.
    """
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    quantized: Any = None
    if isinstance(head, nn.Linear):
        quantized = TableHead(head) if tied else Int8Linear(head)
        causal.set_output_embeddings(quantized)
    if isinstance(embedding, nn.Embedding):
        weight = embedding.weight
        shared = isinstance(quantized, TableHead) and head.weight is weight
        table = quantized if shared else Table(weight)
        setattr(base, embed, TableEmbedding(table, embedding))


def check_covered(layers: nn.Module, quantization: str) -> None:
    """Raise ConfigError where weights of the layers are held outside of linear layers, as experts are."""
    for name, weight in layers.named_parameters():
        if weight.dim() > 1:
            raise ConfigError(
                f"quantization: {quantization} is for linear layers, and {name} is no part of one; use none"
            )
