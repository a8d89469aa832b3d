"""Consecutive layers as phases that a team of threads goes through, with one call of compiled code for all of them.

A phase ends where the next step needs everything that the step before has made, see ``KINDS``. Shapes as in
``compiled.kernels``.
"""

from __future__ import annotations

from typing import Any, Final

from numba import carray, types

from penstock.models.compiled.dot import LANES
from penstock.models.compiled.kept import called_by_address, exact, part
from penstock.models.compiled.kernels import add, gate, norm, round_to, store, turn
from penstock.models.compiled.products import multiply, round_row
from penstock.models.compiled.records import STACK_TYPE, attentions_at, layers_at, numbers
from penstock.models.compiled.threads import COUNTERS, LINE, at_once, await_units, call_units, finished, taken

ENTER, QKV, TURN, ATTEND, ROUND, OUT, MIDDLE, GATE_UP, GATE, OPEN, DOWN, LEAVE = range(12)
KINDS: Final = 12
"""How many kinds of phases a layer has.

The units of products are blocks of outputs, those of ``ATTEND`` the attention's own, all others are rows.
"""


@exact
def _units(kind: int, stack: Any, layer: Any, attention: Any) -> int:
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
    cos, sin, slot = stack.cos + size * row, stack.sin + size * row, carray(numbers(stack.slots), row + 1)[row]
    for head in range(stack.queries):
        if layer.query_norm.weight:
            norm(own + size * head, layer.query_norm, own + size * head)
        turn(own + size * head, cos, sin, width, stack.query + size * (row * stack.queries + head))
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
        gate(stack.gates + 8 * stack.inner * row, stack.inner, opened)
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
