"""The shares of a tensor parallel stage: which outputs of every product each rank computes.

Megatron splits the inputs of the products behind attention and activation, and adds up what the ranks have made: a sum
in another order, whose last bits are others (Shoeybi et al., Megatron-LM, section 3). Here every product is split
by its outputs, and the ranks gather whole rows before each product that reads them:

    q, k, v | attention -> gather attended -> o -> gather change -> gate, up | silu -> gather opened -> down -> gather

Each output is then one rank's sum over the whole row, in the order that it has without ranks. Heads are shared by their
groups, other outputs by the blocks that compiled products have: of uneven numbers the later ranks get more, since the
first also leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config import FieldError
from penstock.models.compiled.dot import LANES
from penstock.models.linear import stored_rows


class Exchange(Protocol):
    """How the ranks of a stage exchange columns of rows. All ranks call it in the same order."""

    def gather(self, rows_NW: np.ndarray, bounds: Sequence[int]) -> None:
        """Fill in the other ranks' columns of float32 rows, in place: rank r has made [bounds[r], bounds[r + 1]).

        Raises ``StageRankLost`` where another rank has ended.
        """
        ...


class Columns(NamedTuple):
    """The columns of a row that each rank computes: rank r those of [bounds[r], bounds[r + 1])."""

    bounds: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        return self.bounds[self.rank]

    @property
    def last(self) -> int:
        return self.bounds[self.rank + 1]

    @property
    def total(self) -> int:
        return self.bounds[-1]

    @property
    def own(self) -> slice:
        return slice(self.first, self.last)


class Ranks:
    """A rank's place among those of its stage. Without an ``exchange``, as while it loads, rows are not completed."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.exchange: Exchange | None = None

    def gather(self, rows_NW: np.ndarray, columns: Columns) -> None:
        if self.exchange is not None:
            self.exchange.gather(rows_NW, columns.bounds)

    def share(self, total: int, unit: int) -> Columns:
        """Columns in whole units of ``unit``, evenly shared: no rank has more than one unit more than another."""
        # Rounded down: of uneven numbers the later ranks get more. The last unit may be cut off by ``total``.
        units = -(-total // unit)
        return Columns(tuple(min(total, units * rank // self.size * unit) for rank in range(self.size + 1)), self.rank)

    def lead(self, rows_NW: np.ndarray) -> None:
        """Give all ranks the first rank's rows."""
        # Bounds 0, W, W, ..: the first rank has made all columns, the others none.
        self.gather(rows_NW, Columns((0, *[rows_NW.shape[1]] * self.size), self.rank))


ALONE: Final = Ranks()
"""The only rank of a stage."""

BY_GROUP: Final = frozenset({"q_proj", "k_proj", "v_proj", "attn_q", "attn_k", "attn_v"})
"""Products whose outputs are shared by groups of keys and values, as checkpoints and GGUF files name them."""
BY_BLOCK: Final = frozenset(
    {"o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"}
    | {"attn_output", "ffn_gate", "ffn_up", "ffn_down", "output", "token_embd"}
)
"""Products whose outputs are shared by blocks; an embedding is shared for the sake of a head that is tied to it."""
EMBEDDINGS: Final = frozenset({"embed_tokens", "token_embd"})


def rows_of_rank(name: str, shape: Sequence[int], rank: int, ranks: int, groups: int) -> Columns | None:
    """The rows that a rank reads of a stored tensor, whose ``name`` and ``shape`` are those of its file.

    ``groups``: groups of keys and values in a layer. None where ranks do not share the tensor's rows: it is no matrix
    of a product, or the first rank's embedding.
    """
    path, _, kind = name.rpartition(".")
    product = path.rpartition(".")[2]
    if kind != "weight" or len(shape) != 2 or (product in EMBEDDINGS and rank == 0):
        return None
    if product in BY_GROUP and shape[0] % groups == 0:
        return Ranks(rank, ranks).share(shape[0], shape[0] // groups)
    return Ranks(rank, ranks).share(shape[0], LANES) if product in BY_BLOCK else None


@dataclass(frozen=True)
class Cut:
    """The columns that each rank computes of the three rows that a layer's ranks gather."""

    ranks: Ranks
    attended: Columns
    """Columns of the attention's output: all heads side by side, of which a rank has whole groups."""
    change: Columns
    """Columns of what attention and feed-forward add to the hidden state."""
    opened: Columns
    """Columns of the feed-forward's inner rows."""


def cut_of(ranks: Ranks, attention: Any, mlp: Any) -> Cut:
    """The cut of a layer of llama's form, whose parts are named as in transformers."""
    width, groups = attention.head_dim, attention.k_proj.out_features // attention.head_dim
    # Keys and values of a group serve several query heads, so that ranks get these heads together.
    heads = attention.q_proj.out_features // width // groups * width
    return Cut(
        ranks,
        ranks.share(attention.q_proj.out_features, heads),
        ranks.share(attention.o_proj.out_features, LANES),
        ranks.share(mlp.gate_proj.out_features, LANES),
    )


@torch.no_grad()
def narrow(layer: Any, ranks: Ranks) -> None:
    """Cut a ``FusedLayer``, whose products have been joined, to a rank's outputs, in place.

    Raises ConfigError where a rank would have none, or the layers cannot be cut.
    """
    whole, heads = layer.cut, layer.heads
    queries, inner = whole.attended.total, whole.opened.total
    # Shares are worked out anew: ``layer.cut`` is that of a stage without ranks.
    attended = ranks.share(queries, queries // heads.groups)
    change, opened = ranks.share(whole.change.total, LANES), ranks.share(inner, LANES)
    linears = layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj
    if not all(type(linear) is nn.Linear for linear in linears):
        raise uncut("their products are no plain ones")
    if problem := lacking(Cut(ranks, attended, change, opened)):
        raise uncut(problem, ranks.size)
    # Columns of the attention's output become groups; keys and values of group g are rows behind all queries.
    first, last = (bound * heads.groups // queries for bound in (attended.first, attended.last))
    keys, size = heads.groups * heads.width, heads.width
    # Joined rows of qkv: queries | keys | values, and of gate_up: gate | up, of each of which a rank keeps its range.
    group_rows = slice(queries + first * size, queries + last * size)
    layer.qkv = cut_rows(layer.qkv, [attended.own, group_rows, slice(group_rows.start + keys, group_rows.stop + keys)])
    layer.o_proj, layer.down_proj = cut_rows(layer.o_proj, [change.own]), cut_rows(layer.down_proj, [change.own])
    layer.gate_up = cut_rows(layer.gate_up, [opened.own, slice(inner + opened.first, inner + opened.last)])
    sinks, each = layer.scoring.get("s_aux"), heads.queries // heads.groups
    if isinstance(sinks, Tensor):
        layer.scoring = {**layer.scoring, "s_aux": sinks[first * each : last * each].clone()}
    heads.queries, heads.groups = (last - first) * each, last - first
    layer.cut = Cut(ranks, attended, change, opened)


def cut_rows(linear: nn.Linear, own: Sequence[slice]) -> nn.Linear:
    """A linear layer with these outputs of another, one range after the other; it holds no more than these."""
    with torch.device("meta"):
        found = nn.Linear(linear.in_features, sum(rows.stop - rows.start for rows in own), bias=False)
    stored, later = stored_rows(linear), []
    for rows in own:
        start = 0
        for part in stored:
            # ``part`` is rows [start, start + outputs) of the layer; they begin at row ``part.first`` of its tensor.
            first, last = max(rows.start, start), min(rows.stop, start + part.outputs)
            if first < last:
                later.append(part._replace(outputs=last - first, first=part.first + first - start))
            start += part.outputs
    # Samples of weights that are read later are not worth copying.
    read_later = all(part.tensor is not None for part in later)
    sample = linear.weight.new_zeros(()).expand(found.weight.shape)
    weight = sample if read_later else torch.cat([linear.weight[rows] for rows in own])
    found.weight = nn.Parameter(weight, requires_grad=False)
    found.stored = later  # type: ignore[assignment]
    if linear.bias is not None:
        found.bias = nn.Parameter(torch.cat([linear.bias[rows] for rows in own]), requires_grad=False)
    return found


class GatheredHead(nn.Module):
    """The head of a tensor parallel stage: each rank computes the logits of its own tokens, and all gather them."""

    def __init__(self, head: nn.Module, ranks: Ranks, columns: Columns) -> None:
        super().__init__()
        self.head = head
        self._ranks, self._columns = ranks, columns

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., V]. Ranks behind the first compute with its rows, whatever they are called with."""
        # float32 and contiguous, since the exchange passes these bytes on; a copy, since it writes into them.
        rows = hidden.reshape(-1, hidden.shape[-1]).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._ranks.lead(rows.numpy())
        own = self.head(rows.to(hidden.dtype))
        logits = torch.zeros(len(rows), self._columns.total)
        logits[:, self._columns.own] = own
        self._ranks.gather(logits.numpy(), self._columns)
        return logits.to(own.dtype).view(*hidden.shape[:-1], -1)


def lacking(cut: Cut) -> str:
    """The reason why a rank would have nothing to do; empty where each has something."""
    for columns, parts in (
        (cut.attended, "groups of keys and values"),
        (cut.change, f"blocks of {LANES} in its hidden size"),
        (cut.opened, f"blocks of {LANES} in its intermediate size"),
    ):
        if several := sum(first == last for first, last in pairwise(columns.bounds)):
            return f"its layers have {cut.ranks.size - several} {parts}"
    return ""


def uncut(problem: str, size: int | None = None) -> FieldError:
    """The refusal of layers that ranks cannot share, or not so many."""
    asked = "cannot be more than 1 for this model" if size is None else f"is {size}, which this model is too small for"
    return FieldError("tensor_parallel_size", f"{asked}: {problem}; use pipeline_parallel_size")
