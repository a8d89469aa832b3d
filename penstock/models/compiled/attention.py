"""Attention over slots in compiled loops: every row sums in the order of positions, wherever its slots lie."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, types
from torch import Tensor

from penstock.models.attention import Arenas, Plan, Scoring, SlotAttention, Span, parts_of, precise_kernel
from penstock.models.compiled.cache import ATTENTION, ATTENTION_TYPE, address_of, called_by_address, exact
from penstock.models.compiled.products import attention_of, whole_team
from penstock.models.compiled.threads import COUNTERS, at_once, call_units, share, taken
from penstock.stage.visibility import BatchView, RequestView


class SeenSlots(NamedTuple):
    """Rows [n] of a batch. Row i sees slots[starts[i]:starts[i + 1]], in the order of their positions."""

    rows: np.ndarray
    starts: np.ndarray
    slots: np.ndarray

    def fill(self, tasks: np.ndarray) -> None:
        """Write these rows and slots into ``ATTENTION`` records, whose groups have been filled in."""
        tasks["rows"], tasks["starts"], tasks["slots"] = map(address_of, self)
        tasks["units"] = len(self.rows) * tasks["groups"]


class CompiledAttention(SlotAttention):
    """Answers a batch's attention calls in float32 on a CPU, one row after another.

    A row's bits depend only on what it sees: neither on the rows beside it nor on where its slots lie.
    """

    def __init__(self, arenas: Arenas, view: BatchView, device: torch.device) -> None:
        # The kernel serves layers that use an arena otherwise than as keys and values, such as latent ones.
        super().__init__(arenas, Plan(view, device, in_place=True), precise_kernel)
        self._view = view
        self._seen: dict[Span, SeenSlots] = {}

    def attended(self, query_HNd: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, span: Span) -> Tensor:
        """The output of the batch's attention over a layer's arenas: [N, H, e]."""
        heads, count, width = query_HNd.shape
        query_HNd = query_HNd.contiguous()
        output_NHe = torch.empty(count, heads, values.shape[2])
        sinks_H = sinks_of(scoring.sinks_H, heads)
        task = np.zeros(1, ATTENTION)
        task["groups"] = len(keys)
        # [H, N, d] in bytes: heads lie N * d float32 apart, rows of a head d.
        task["query"], task["query_head"], task["query_row"] = query_HNd.data_ptr(), 4 * count * width, 4 * width
        fill_arenas(task, keys, values)
        self.seen(span).fill(task)
        out_row, out_head = (4 * stride for stride in output_NHe.stride()[:2])
        task["out"], task["out_row"], task["out_head"] = output_NHe.data_ptr(), out_row, out_head
        task["scaling"], task["softcap"] = scoring.scaling, scoring.softcap or 0.0
        task["sinks"] = sinks_H.data_ptr()
        task["attend"] = attention_of(heads // len(keys), width, values.shape[2])
        _attend_together(task, _work.address, *whole_team())
        return output_NHe

    def seen(self, span: Span) -> SeenSlots:
        """The slots that the rows of all requests see within the span."""
        if span not in self._seen:
            view = self._view
            found = [seen_slots(view, request, part, span) for request in view.views for part in parts_of(request)]
            self._seen[span] = found[0] if len(found) == 1 else in_one(found)
        return self._seen[span]


def fill_arenas(task: np.ndarray, keys: Tensor, values: Tensor) -> None:
    """Write the addresses of a layer's arenas into ``ATTENTION`` records."""
    task["keys"], task["values"] = keys.data_ptr(), values.data_ptr()
    size = keys.element_size()
    task["key_group"], task["key_slot"] = (size * stride for stride in keys.stride()[:2])
    task["value_group"], task["value_slot"] = (size * stride for stride in values.stride()[:2])


@exact
def _attend_together(task: Any, work: int, threads: int, parallel: int) -> None:
    counters = np.zeros(COUNTERS, np.int64)
    task[0].counters, task[0].threads = counters.ctypes.data, threads
    share(parallel, work, task.ctypes.data, threads)
    counters[0] = 0  # keeps the array alive: the threads use its address until here


@called_by_address(types.void(types.CPointer(ATTENTION_TYPE)))
def _work(pointer: Any) -> None:
    """One thread's part of the work: units that no other thread has taken yet."""
    task = carray(pointer, 1)
    attention = task[0]
    several = at_once(attention.units, attention.threads)
    first = taken(attention.counters, several)
    while first < attention.units:
        call_units(attention.attend, task.ctypes.data, first, min(first + several, attention.units))
        first = taken(attention.counters, several)


def sinks_of(sinks_H: Tensor | None, heads: int) -> Tensor:
    """The sinks as compiled code takes them, float32 [heads]; -inf for heads without one: it gets no share."""
    return no_sinks(heads) if sinks_H is None else sinks_H.float().contiguous()


@functools.cache
def no_sinks(heads: int) -> Tensor:
    """Sinks [heads] that take no part of any weight: minus infinity."""
    return torch.full((heads,), -torch.inf)


def seen_slots(view: BatchView, request: RequestView, part: slice, span: Span) -> SeenSlots:
    """The slots that the rows ``part`` of a request see within ``span``."""
    mask = span.of(view, request, part)
    if request.committed < len(request.slots):  # uncommitted slots, behind the others, are not in position order
        order = np.argsort(request.positions, kind="stable")
        mask, slots = mask[:, order], request.slots[order]
    else:
        slots = request.slots
    # slots 7 4 9, row 0 sees 7 4, row 1 all three: starts 0 2 5, slots 7 4 7 4 9.
    starts = np.zeros(len(mask) + 1, np.int64)
    np.cumsum(mask.sum(axis=1), out=starts[1:])
    rows = np.ascontiguousarray(request.rows[part], np.int64)
    return SeenSlots(rows, starts, np.broadcast_to(slots, mask.shape)[mask].astype(np.int32))


def in_one(parts: list[SeenSlots]) -> SeenSlots:
    """Several parts as one, their rows in this order."""
    # Each part counts its slots from 0: its starts move behind the slots of the parts before it.
    ends = np.cumsum([0, *(len(part.slots) for part in parts)])
    starts = [part.starts[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
    return SeenSlots(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([*starts, ends[-1:]]),
        np.concatenate([part.slots for part in parts]),
    )
