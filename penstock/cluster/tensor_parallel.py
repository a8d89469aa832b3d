"""Tensor parallel stages: each rank's share of a layer, and the rows that ranks send each other.

Every matrix is split by its outputs and every sum stays whole, so that the tokens are the same for any number of ranks.
Megatron-LM (Shoeybi et al., section 3) splits the inputs of ``o`` and ``down`` instead, and adds up partial sums with
two all-reduces a layer. Here a layer has four all-gathers of whole rows:

    q, k, v -> attend | attended | -> o | o | -> gate, up | opened | -> down | down |

Attention is shared by KV groups, all other outputs in blocks of 16: the formats int8 and int4 compute blocks of that
many outputs, and one rule for every format gives the same slices whatever the weights are held as.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from penstock.cluster.drawn import split_by_speed
from penstock.cluster.spec import ModelPrice
from penstock.config import FieldError

BLOCK: Final = 16
"""Outputs in a slice's smallest part; the last one may be shorter."""
GATHERS: Final = 4
"""All-gathers in a layer: what attention gives, what ``o`` gives, what ``down`` reads, what ``down`` gives."""


class Shares(NamedTuple):
    """How many units of each dimension every rank has, in the ranks' order."""

    heads: tuple[int, ...]
    """KV groups, with the heads of queries that read them."""
    hidden: tuple[int, ...]
    """Blocks of the outputs of ``o`` and ``down``."""
    opened: tuple[int, ...]
    """Blocks of the outputs of ``gate`` and ``up``."""
    logits: tuple[int, ...]
    """Blocks of the head's outputs."""


class Exchange(NamedTuple):
    """All that crosses a rank's link for a batch: messages one after the other, and bytes for each of its rows."""

    messages: int
    row_bytes: float


def check_divisible(model: ModelPrice, ranks: int, where: str) -> None:
    """Raise FieldError unless ``ranks`` ranks can share the model's layers. ``where``: the field that names the ranks.

    The error names a field of ``as_model`` where a size is unknown or wrong.
    """
    if model.kinds:
        problem = f"says that layers differ, and {where} are tensor parallel ranks, which share layers that are alike"
        raise FieldError("as_model.kinds", f'{problem}: split the stage by "layers"')
    for name in ("key_value_heads", "intermediate_size"):
        if getattr(model, name) is None:
            remedy = f'state it, or split the stage by "layers" (mixtures of experts have no {name} to be split by yet)'
            raise FieldError(f"as_model.{name}", f"is missing, and {where} are tensor parallel ranks: {remedy}")
    if (least := sum(matrices(model)[:3])) > model.layer_parameters:
        problem = (
            f"is {model.layer_parameters}, and q, k, v, o and down of these sizes have {least}; correct one of them"
        )
        raise FieldError("as_model.layer_parameters", problem)
    assert model.key_value_heads is not None
    assert model.intermediate_size is not None
    most = {
        "KV groups of a layer": model.key_value_heads,
        f"blocks of {BLOCK} outputs of hidden_size": blocks(model.hidden_size),
        f"blocks of {BLOCK} outputs of intermediate_size": blocks(model.intermediate_size),
        f"blocks of {BLOCK} outputs of the head": blocks(logits(model)),
    }
    for what, count in most.items():
        if ranks > count:
            raise FieldError(where, f"are {ranks} tensor parallel ranks for the {count} {what}; name at most {count}")


@lru_cache(maxsize=256)
def shares_of(model: ModelPrice, speeds: tuple[float, ...]) -> Shares:
    """Each rank's share of a model that ``check_divisible`` accepts, in proportion to the ranks' ``speeds``.

    Each unit goes to the rank that would be done first with it: ranks of equal speed differ by one unit at most, and
    the first ones have more.
    """
    assert model.key_value_heads is not None
    assert model.intermediate_size is not None
    units = (model.key_value_heads, *map(blocks, (model.hidden_size, model.intermediate_size, logits(model))))
    return Shares(*(tuple(split_by_speed(count, speeds)) for count in units))


def rank_prices(model: ModelPrice, speeds: tuple[float, ...]) -> tuple[ModelPrice, ...]:
    """The price of each rank's part of the model: what it holds, reads and computes of every layer and of the head.

    Summed over the ranks, parameters, queries, keys and values are the model's own. The leader, which comes first,
    holds the embedding. Norms are counted among the outputs of ``gate`` and ``up``.
    """
    shares = shares_of(model, speeds)
    incoming, after, down, opened = matrices(model)
    by_rank = zip(
        parts(incoming, shares.heads),
        parts(after + down, shares.hidden),
        parts(opened, shares.opened),
        parts(model.head_parameters, shares.logits),
        parts(model.queries, shares.heads),
        parts(model.keys, shares.heads),
        strict=True,
    )
    return tuple(
        replace(
            model,
            layer_parameters=attending + hidden + opening,
            head_parameters=head,
            embedding_parameters=0 if rank else model.embedding_parameters,
            attention_size=queries,
            key_value_size=keys,
            # A rank's part is not split again.
            key_value_heads=None,
            intermediate_size=None,
        )
        for rank, (attending, hidden, opening, head, queries, keys) in enumerate(by_rank)
    )


def exchange_of(model: ModelPrice, speeds: tuple[float, ...], layers: int, *, head: bool) -> Exchange:
    """The traffic of the rank that sends most, for a stage of ``layers`` layers, with the head if stated.

    The leader sends its batch's hidden states to every other rank: those that come in, and those that the head reads,
    which only it keeps. In each gather every rank sends its slice to
    all others at the same time, and its link takes these messages one after the other; latencies overlap.
    """
    others = len(speeds) - 1
    if not others:
        return Exchange(0, 0.0)
    shares = shares_of(model, speeds)
    entering = model.activation_bytes if model.gathered_bytes is None else model.gathered_bytes
    assert model.intermediate_size is not None
    attended = largest(shares.heads) * model.queries * entering
    opened = largest(shares.opened) * model.intermediate_size * entering
    # o and down each give a row of hidden states, which the next norm needs whole.
    hidden = 2 * largest(shares.hidden) * model.row_bytes
    sampled = largest(shares.logits) * logits(model) * model.activation_bytes if head else 0.0
    handed_out = 2 if head else 1
    row_bytes = others * (handed_out * model.row_bytes + layers * (attended + opened + hidden) + sampled)
    return Exchange(handed_out + GATHERS * layers + head, row_bytes)


def matrices(model: ModelPrice) -> tuple[int, int, int, int]:
    """Parameters of a layer's q, k and v; of its o; of its down; and of the rest, gate, up and norms."""
    assert model.intermediate_size is not None
    incoming, after = model.hidden_size * (model.queries + 2 * model.keys), model.queries * model.hidden_size
    down = model.intermediate_size * model.hidden_size
    return incoming, after, down, model.layer_parameters - incoming - after - down


def logits(model: ModelPrice) -> int:
    """Outputs of the head; its norm counts as one of them."""
    return max(1, model.head_parameters // model.hidden_size)


def blocks(outputs: int) -> int:
    return -(-outputs // BLOCK)


def parts(total: int, units: Sequence[int]) -> list[int]:
    """``total`` in proportion to the units, in whole numbers whose sum is ``total``."""
    ends = [total * end // sum(units) for end in accumulate(units, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def largest(units: Sequence[int]) -> float:
    """Fraction of the largest share, 0 to 1."""
    return max(units) / sum(units)
