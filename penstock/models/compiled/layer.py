"""Fused layers, compiled: one call for all layers between two that have hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, types
from torch import Tensor, nn

from penstock.config import FieldError
from penstock.files import EXACT
from penstock.models.attention import Arenas, Span, chosen
from penstock.models.compiled.attention import CompiledAttention, fill_arenas, sinks_of
from penstock.models.compiled.cache import (
    ATTENTION,
    LAYER,
    NORM,
    STACK,
    STACK_TYPE,
    address_of,
    attentions_at,
    called_by_address,
    exact,
    layers_at,
    numbers,
    part,
)
from penstock.models.compiled.dot import GROUP, LANES
from penstock.models.compiled.float_blocks import FORMS
from penstock.models.compiled.products import (
    add,
    attention_of,
    gate,
    multiply,
    norm,
    norm_rows,
    round_row,
    round_to,
    size_of,
    store,
    turn,
    whole_team,
)
from penstock.models.compiled.threads import COUNTERS, LINE, at_once, await_units, call_units, finished, share, taken
from penstock.models.fused import FusedBase, FusedLayer, RMSNorm, has_form, is_silu
from penstock.models.shares import ALONE, Columns, Cut

# ---------------------------------------------------------------------------------------------------------------- stack
# Consecutive layers as phases that a team of threads goes through, with one call of compiled code for all of them.
#
# A phase ends where the next step needs everything that the step before has made, see ``KINDS``. Shapes as in
# ``compiled.products``.

ENTER, QKV, TURN, ATTEND, ROUND, OUT, MIDDLE, GATE_UP, GATE, OPEN, DOWN, LEAVE = range(12)
KINDS: Final = 12
"""Kinds of phases that a layer goes through.

The units of products are blocks of outputs, those of ``ATTEND`` units of the attention, those of all others rows.
"""


@exact
def _units(kind: int, stack: Any, layer: Any, attention: Any) -> int:
    """The number of units of a phase: 0 where there is nothing to do."""
    units: int = stack.rows.count
    if kind == QKV:
        units = layer.qkv.outputs // LANES
    elif kind == ATTEND:
        units = attention.units
    elif kind == OUT:
        units = layer.o_proj.outputs // LANES
    elif kind == DOWN:
        units = layer.down_proj.outputs // LANES
    elif kind == GATE_UP:
        units = layer.gate_up.outputs // LANES
    elif kind == OPEN and stack.inner == layer.down_proj.inputs:
        units = 0  # nothing was gathered: GATE has rounded the row
    return units


@part
def _multiply(kind: int, stack: Any, layer: Any, first: int, last: int) -> None:
    """Multiply the rows by the blocks [first, last) of a phase's product."""
    # A rank's own outputs go to their columns of the whole row (``change``), where the others' are gathered.
    if kind == QKV:
        weights, out, width = layer.qkv, stack.qkv, layer.qkv.outputs
    elif kind == OUT:
        weights, out, width = layer.o_proj, stack.change + stack.own_change, layer.input_norm.width
    elif kind == GATE_UP:
        weights, out, width = layer.gate_up, stack.gates, layer.gate_up.outputs
    else:
        weights, out, width = layer.down_proj, stack.change + stack.own_change, layer.input_norm.width
    multiply(weights, stack.rows, out, width, first, last)


@exact
def _turn_row(row: int, stack: Any, layer: Any, attention: Any) -> None:
    """Rotate a row's queries for the attention, and put its keys and values into its slot."""
    width, heads = stack.width, stack.queries + 2 * stack.groups
    # Bytes of a head: all addresses here are in bytes, and numbers in float32.
    size = 4 * width
    own = stack.qkv + size * heads * row
    if layer.bias:
        add(own, layer.bias, own, heads * width)
    # A row of qkv: all query heads, then all keys, then all values, of ``width`` numbers each.
    cos, sin, slot = stack.cos + size * row, stack.sin + size * row, carray(numbers(stack.slots), row + 1)[row]
    for head in range(stack.queries):
        if layer.query_norm.weight:
            norm(own + size * head, layer.query_norm, own + size * head)
        turn(own + size * head, cos, sin, width, stack.query + size * (row * stack.queries + head))
    # Behind the queries: keys and values of group g lie ``groups`` heads apart.
    own += size * stack.queries
    for group in range(stack.groups):
        key, value = own + size * group, own + size * (stack.groups + group)
        if layer.key_norm.weight:
            norm(key, layer.key_norm, key)
        turn(key, cos, sin, width, key)
        store(key, attention.keys + group * attention.key_group + slot * attention.key_slot, width, stack.form)
        store(value, attention.values + group * attention.value_group + slot * attention.value_slot, width, stack.form)


@exact
def _do_row(kind: int, row: int, stack: Any, layer: Any) -> None:
    width = layer.input_norm.width
    """Do a row's step of a phase that goes row by row: norms, sums, and rounding for the next product."""
    before = 4 * width * row
    hidden, normed, change = stack.hidden + before, stack.normed + before, stack.change + before
    if kind == ENTER:
        norm(hidden, layer.input_norm, normed)
        round_row(row, normed, stack.rows, layer.qkv.inputs, layer.qkv.form)
    elif kind == ROUND:
        weights = layer.o_proj
        round_row(row, stack.attended + 4 * weights.inputs * row, stack.rows, weights.inputs, weights.form)
    elif kind == MIDDLE:
        add(hidden, change, hidden, width)
        norm(hidden, layer.mlp_norm, normed)
        round_row(row, normed, stack.rows, layer.gate_up.inputs, layer.gate_up.form)
    elif kind == GATE:
        weights = layer.down_proj
        opened = stack.opened + 4 * weights.inputs * row + stack.own_opened
        # ``gates`` has 2 * inner float32 a row: 8 bytes for each of the inner numbers.
        gate(stack.gates + 8 * stack.inner * row, stack.inner, opened)
        # With ranks or padding the row is not yet whole: OPEN rounds it then.
        if stack.inner == weights.inputs:
            round_row(row, opened, stack.rows, weights.inputs, weights.form)
    elif kind == OPEN:
        weights = layer.down_proj
        round_row(row, stack.opened + 4 * weights.inputs * row, stack.rows, weights.inputs, weights.form)
    else:
        add(hidden, change, hidden, width)
        # Another stage may begin here: what it would be sent is what the next layer gets.
        round_to(hidden, width, stack.form)


@exact
def _do(kind: int, stack: Any, index: int, first: int, last: int) -> None:
    """Do the units [first, last) of a layer's phase."""
    layer = carray(layers_at(stack.layers), stack.count)[index]
    attentions = carray(attentions_at(stack.attentions), stack.count)
    if kind == ATTEND:
        call_units(attentions[index].attend, attentions[index:].ctypes.data, first, last)
    elif kind == TURN:
        for row in range(first, last):
            _turn_row(row, stack, layer, attentions[index])
    elif kind in (QKV, OUT, GATE_UP, DOWN):
        _multiply(kind, stack, layer, first, last)
    else:
        for row in range(first, last):
            _do_row(kind, row, stack, layer)


@called_by_address(types.void(types.CPointer(STACK_TYPE)))
def go(pointer: Any) -> None:
    """One thread's part of the phases [first, last) of all layers."""
    stack = carray(pointer, 1)[0]
    layers = carray(layers_at(stack.layers), stack.count)
    attentions = carray(attentions_at(stack.attentions), stack.count)
    # Every phase has its own counters, so that a late thread cannot take units of a phase that is over.
    for phase in range(stack.first, stack.last):
        index, kind = phase // KINDS, phase % KINDS
        # The second counter is a cache line behind the first, so that threads that finish do not slow those that take.
        counter = stack.counters + 8 * COUNTERS * phase
        done = counter + 8 * LINE
        units = _units(kind, stack, layers[index], attentions[index])
        several = at_once(units, stack.threads)
        first = taken(counter, several)
        while first < units:
            last = min(first + several, units)
            _do(kind, stack, index, first, last)
            finished(done, last - first)
            first = taken(counter, several)
        # The next phase reads what all threads have written in this one.
        await_units(done, units)


# ---------------------------------------------------------------------------------------------------------------- layer
# Layers as modules: a layer that is watched is called alone, neighbours of one form as one ``Stack``.


class Turn(NamedTuple):
    """Cosines and sines of each row, [N, d]."""

    cos: np.ndarray
    sin: np.ndarray


class CompiledNorm(nn.Module):
    """Replaces the ``RMSNorm`` before a model's head on a CPU: a row's bits depend on no other row."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self._norm, self._record = norm, np.zeros(1, NORM)
        self._record[0] = norm_record(norm)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., D], in the format of ``hidden``"""
        rows = hidden.to(torch.float32, memory_format=torch.contiguous_format)
        found = torch.empty_like(rows)
        norm_rows(rows.data_ptr(), rows.numel() // rows.shape[-1], address_of(self._record), found.data_ptr())
        return found.to(hidden.dtype)


def norm_record(norm: RMSNorm) -> tuple[int, int, float]:
    """The fields of a ``NORM`` record: the address of the weight times the root of its width, that width, and least."""
    return norm.scaled.data_ptr(), len(norm.scaled), float(norm.least)


class CompiledLayer(nn.Module):
    """Replaces a ``FusedLayer`` on a CPU; takes over its parts.

    ``dtype`` is the format of hidden states between layers, and of keys and values. All else is computed in float32,
    and rows of products are rounded to the form that the weights take.
    """

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.layer_idx = layer.layer_idx
        self.heads = layer.heads
        self.scoring = layer.scoring
        self.qkv, self.o_proj = layer.qkv, layer.o_proj
        self.gate_up, self.down_proj = layer.gate_up, layer.down_proj
        self.norms = [layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm]
        self.bias = None if layer.qkv.bias is None else layer.qkv.bias.detach().float().contiguous()
        self.cut: Cut = layer.cut
        self.form = layer.scoring.get("sliding_window"), vars(layer.heads), self.cut
        """Window, heads and cut. Layers of one form share their buffers, and the slots that their rows see."""
        self.alone = Stack([self])

    def fill(self, record: np.ndarray) -> None:
        """Write what compiled code needs to know of the layer into a ``LAYER`` record."""
        for name in ("qkv", "o_proj", "gate_up", "down_proj"):
            record[name] = getattr(self, name).weights.record
        for name, module in zip(("input_norm", "mlp_norm", "query_norm", "key_norm"), self.norms, strict=True):
            if module is not None:
                record[name] = norm_record(module)
        record["bias"] = 0 if self.bias is None else self.bias.data_ptr()

    def forward(self, hidden: Tensor, rotation: Turn) -> Tensor:
        """[1, N, D] -> [1, N, D]"""
        return self.alone(hidden, rotation)


class Stack:
    """Compiled layers of one form: computes from the first layer's input to the last one's output.

    Between two calls it keeps addresses, and buffers that fit the rows of the last batch.
    """

    def __init__(self, layers: Sequence[CompiledLayer]) -> None:
        self._layers = list(layers)
        first = self._layers[0]
        self._dtype = first.dtype
        self._heads, self._window = first.heads, first.scoring.get("sliding_window")
        self._cut = first.cut
        self._inner = first.gate_up.outputs // 2
        self._records, self._attentions = np.zeros(len(layers), LAYER), np.zeros(len(layers), ATTENTION)
        self._counters = np.zeros(len(layers) * KINDS * COUNTERS, np.int64)
        self._sinks = [sinks_of(layer.scoring.get("s_aux"), self._heads.queries) for layer in layers]
        for index, layer in enumerate(layers):
            layer.fill(self._records[index : index + 1])
            self._fill_scoring(self._attentions[index : index + 1], index)
        self._stack = np.zeros(1, STACK)
        for name, number in (
            ("layers", address_of(self._records)), ("attentions", address_of(self._attentions)),
            ("counters", address_of(self._counters)), ("count", len(layers)), ("queries", self._heads.queries),
            ("groups", self._heads.groups), ("width", self._heads.width), ("inner", self._inner),
            ("own_change", 4 * self._cut.change.first), ("own_opened", 4 * self._cut.opened.first),
            ("form", FORMS[self._dtype]),
        ):  # fmt: skip
            self._stack[name] = number
        self._buffers: list[np.ndarray] = []
        self._shared: dict[str, np.ndarray] = {}
        """The float32 buffers among them, by name."""
        self._count = 0
        self._arenas: tuple[Arenas, int] | None = None

    def _fill_scoring(self, attention: np.ndarray, index: int) -> None:
        heads, scoring = self._heads, self._layers[index].scoring
        attention["groups"] = heads.groups
        attention["scaling"], attention["softcap"] = scoring["scaling"], scoring.get("softcap") or 0.0
        attention["sinks"] = self._sinks[index].data_ptr()
        attention["attend"] = attention_of(heads.queries // heads.groups, heads.width, heads.width, FORMS[self._dtype])

    def __call__(self, hidden: Tensor, rotation: Turn) -> Tensor:
        """[1, N, D] -> [1, N, D]"""
        attention: CompiledAttention = chosen(self._layers, self._window)
        # A copy, because the compiled layers add to it in place.
        left_ND = hidden[0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self._count != len(left_ND):
            self._make_buffers(len(left_ND))
        # Buffers and arenas are the same in most calls: their addresses are written only when they have changed.
        self._follow(attention.arenas)
        attention.seen(Span(self._window)).fill(self._attentions)
        stack, slots_N = self._stack, attention.plan.slots_N
        stack["hidden"], stack["slots"] = left_ND.data_ptr(), slots_N.data_ptr()
        stack["cos"], stack["sin"] = map(address_of, rotation)
        threads, parallel = whole_team()
        stack["threads"] = threads
        # The threads count units up to the end of each phase: every run begins at 0.
        self._counters.fill(0)
        first = 0
        for last, rows, columns in self._gathers():
            stack["first"], stack["last"] = first, last
            share(parallel, go.address, address_of(stack), threads)
            self._cut.ranks.gather(rows, columns)
            first = last
        stack["first"], stack["last"] = first, KINDS * len(self._layers)
        share(parallel, go.address, address_of(stack), threads)
        return left_ND.to(self._dtype)[None]

    def _gathers(self) -> Iterator[tuple[int, np.ndarray, Columns]]:
        """The phases [.., last) before which rows are gathered: ``last``, the rows, and the columns of each rank."""
        cut = self._cut
        if cut.ranks.size == 1:
            return
        for phase in range(0, KINDS * len(self._layers), KINDS):
            # In the order of ``KINDS``: behind ATTEND, OUT, GATE and DOWN ranks have but their own columns.
            yield phase + ATTEND + 1, self._shared["attended"], cut.attended
            yield phase + OUT + 1, self._shared["change"], cut.change
            yield phase + GATE + 1, self._shared["opened"], cut.opened
            yield phase + DOWN + 1, self._shared["change"], cut.change

    def _make_buffers(self, count: int) -> None:
        """Make buffers for ``count`` rows, and record their addresses."""
        heads, padded = self._heads, self._layers[0].down_proj.weights.inputs
        queries = heads.queries * heads.width
        attended, width = self._cut.attended.total, self._cut.change.total
        most = max(width, attended, padded)
        widths = {
            "normed": width, "qkv": queries + 2 * heads.groups * heads.width, "query": queries,
            "attended": attended, "change": width, "gates": 2 * self._inner, "opened": padded,
        }  # fmt: skip
        buffers = {name: np.zeros((count, width), np.float32) for name, width in widths.items()}
        # One buffer takes the rounded rows of all products in turn, and is as wide as the widest of them.
        most_bytes = most * size_of(self._layers[0].down_proj.weights.form)
        rows = [
            np.empty((count, most_bytes), np.int8),
            *(np.empty((count, most // GROUP), np.float32) for _ in range(2)),
        ]
        self._count, self._buffers, self._shared = count, [*buffers.values(), *rows], buffers
        for name, buffer in buffers.items():
            self._stack[name] = address_of(buffer)
        self._stack["rows"] = (*map(address_of, rows), count)
        size, task = 4 * heads.width, self._attentions
        task["query_head"] = task["out_head"] = size
        task["query_row"], task["out_row"] = size * heads.queries, 4 * attended
        task["query"] = self._stack["query"]
        task["out"] = self._stack["attended"] + 4 * self._cut.attended.first

    def _follow(self, arenas: Arenas) -> None:
        """Record the addresses of the layers' arenas, unless they are those of the last batch.

        A layer's arenas are made when first needed, and anew when they grow.
        """
        if self._arenas == (arenas, arenas.capacity):
            return
        like_KNd = torch.empty(self._heads.groups, 0, self._heads.width, dtype=self._dtype)
        for index, layer in enumerate(self._layers):
            fill_arenas(self._attentions[index : index + 1], *arenas.of(layer.layer_idx, like_KNd, like_KNd))
        self._arenas = arenas, arenas.capacity


class CompiledBase(FusedBase):
    """A stage's base model whose layers are compiled, and run in stacks of one form."""

    def __init__(self, embed: nn.Module, rotary: nn.Module, layers: nn.ModuleList, own: Sequence[Any]) -> None:
        super().__init__(embed, rotary, layers, own)
        self.ranks = ALONE
        self._stacks: dict[tuple[int, int], Stack] = {}

    def turned(self, hidden: Tensor, position_ids: Tensor) -> Turn:
        # Cosines have the format of what they are asked with; in 16 bits they would be off by a hundredth of a turn.
        return super().turned(hidden.new_empty(0, dtype=torch.float32), position_ids)  # type: ignore[no-any-return]

    def rotation(self, cos_1Nd: Tensor, sin_1Nd: Tensor) -> Turn:
        return Turn(cos_1Nd[0].contiguous().numpy(), sin_1Nd[0].contiguous().numpy())
        # Contiguous, since compiled code finds row and column by address.

    def through(self, hidden: Tensor, rotation: Turn) -> Tensor:
        # Ranks behind the first are called with rows of zeros (``StageModel.follow``), and get the first one's here.
        if self.ranks.size > 1:
            rows = hidden[0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            self.ranks.lead(rows.numpy())
            hidden = rows.to(hidden.dtype)[None]
        for first, last in self._parts():
            if is_watched(self.own[first]):
                hidden = self.own[first](hidden, rotation)
            else:
                hidden = self._stack(first, last)(hidden, rotation)
        return hidden

    def _stack(self, first: int, last: int) -> Stack:
        if (first, last) not in self._stacks:
            self._stacks[first, last] = Stack(self.own[first:last])
        return self._stacks[first, last]

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Ranges of layers that are computed in one call: neighbours of one form; each layer with hooks is alone."""
        first = 0
        for index in range(1, len(self.own)):
            if not go_together(self.own[first], self.own[index]):
                yield first, index
                first = index
        yield first, len(self.own)


def go_together(one: CompiledLayer, other: CompiledLayer) -> bool:
    """Whether two layers can be computed in one call."""
    return one.form == other.form and not is_watched(one) and not is_watched(other)


def is_watched(layer: nn.Module) -> bool:
    """Whether the layer has hooks, which need its real input and output."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def compiled(base: FusedBase, dtype: torch.dtype) -> CompiledBase:
    """``base`` with all of its layers, which ``can_compile``, replaced by compiled ones of ``dtype``.

    Its linear layers have been packed. For ``dtype`` see ``CompiledLayer``.
    """
    own = []
    for index, layer in enumerate(base.layers):
        if isinstance(layer, FusedLayer):
            base.layers[index] = CompiledLayer(layer, dtype)
            own.append(base.layers[index])
    return CompiledBase(base.embed_tokens, base.rotary_emb, base.layers, own)


def can_compile(base: nn.Module, inputs: int) -> bool:
    """Whether a base model is fused, and compiled loops exist for all that its layers do.

    It is asked before linear layers are packed. A product's inputs have to be a multiple of ``inputs``.
    """
    return isinstance(base, FusedBase) and all(_can_compile(layer, inputs) for layer in base.own)


def _can_compile(layer: FusedLayer, inputs: int) -> bool:
    linears: list[Any] = [layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj]
    norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    return (
        all(type(linear) is nn.Linear and linear.out_features % LANES == 0 for linear in linears)
        # What enters the last product is filled up with zeros where that is needed.
        and all(linear.in_features % inputs == 0 for linear in linears[:-1])
        and all(linear.bias is None for linear in linears[1:])
        and all(norm is None or isinstance(norm, RMSNorm) for norm in norms)
        and is_silu(layer.act)
    )


def have_form(layers: Sequence[nn.Module]) -> bool:
    """Whether decoder layers, as transformers has built them, are of a form that can be ``exact``.

    Whether they compute what their form says shows only when they are loaded.
    """
    return all(map(has_own_form, layers))


def has_own_form(layer: Any) -> bool:
    """Whether a decoder layer, as transformers has built it, has the form of compiled ones."""
    if not has_form(layer) or not is_silu(layer.mlp.act_fn):
        return False
    unbiased = (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    return all(getattr(linear, "bias", None) is None for linear in unbiased)


def inexact() -> FieldError:
    """The refusal of layers that cannot be ``exact``."""
    return FieldError(
        "numerics",
        f"is {EXACT!r}, which takes layers of llama's form on a CPU, with RMS norms and silu; this model's layers run "
        "in transformers' modules, whose sums depend on the rows beside a row: leave it out, or give 'fast'",
    )
