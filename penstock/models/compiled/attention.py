"""Attention over slots in compiled loops: every row's sum in the order of positions, wherever its slots lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.models.attention import Arenas, Plan, Scoring, SlotAttention, Span, parts_of, precise_kernel
from penstock.models.compiled import kernels
from penstock.models.compiled.rows import by_rows
from penstock.stage.visibility import BatchView, RequestView


class SeenSlots(NamedTuple):
    """Rows [n] of a batch, and the slots that each sees in position order: from starts[i] to starts[i + 1]."""

    rows: np.ndarray
    starts: np.ndarray
    slots: np.ndarray

    def part(self, first: int, last: int) -> SeenSlots:
        return SeenSlots(self.rows[first:last], self.starts[first : last + 1], self.slots)


class CompiledAttention(SlotAttention):
    """Answers a batch's attention calls in float32 on a CPU, one row after another.

    A row's bits then depend on what it sees alone: not on the rows beside it, nor on where its slots lie.
    """

    def __init__(self, arenas: Arenas, view: BatchView, device: torch.device) -> None:
        # The kernel is for those who see an arena in another way than as keys and values.
        super().__init__(arenas, Plan(view, device, in_place=True), precise_kernel)
        self._seen: dict[Span, list[SeenSlots]] = {}

    def attended(self, query_HNd: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, span: Span) -> Tensor:
        """What the rows see of a layer's arenas: [N, H, e]."""
        heads, count, _ = query_HNd.shape
        output_NHe = torch.empty(count, heads, values.shape[2])
        sinks_H = no_sinks(heads) if scoring.sinks_H is None else scoring.sinks_H.float().numpy()
        arrays = query_HNd.contiguous().numpy(), keys.numpy(), values.numpy()
        numbers = scoring.scaling, scoring.softcap or 0.0, sinks_H, output_NHe.numpy()
        attend = kernels.attention_of(heads // len(keys), query_HNd.shape[2], values.shape[2])
        for seen in self.seen(span):
            by_rows(partial(attend_part, attend, seen, arrays, numbers), len(seen.rows))
        return output_NHe

    def seen(self, span: Span) -> list[SeenSlots]:
        if span not in self._seen:
            view = self.plan.view
            self._seen[span] = [
                seen_slots(view, request, part, span) for request in view.views for part in parts_of(request)
            ]
        return self._seen[span]


def attend_part(
    attend: Callable[..., None],
    seen: SeenSlots,
    arrays: tuple[Any, ...],
    numbers: tuple[Any, ...],
    first: int,
    last: int,
) -> None:
    attend(*arrays, *seen.part(first, last), *numbers)


@functools.cache
def no_sinks(heads: int) -> np.ndarray:
    return np.full(heads, -np.inf, np.float32)


def seen_slots(view: BatchView, request: RequestView, part: slice, span: Span) -> SeenSlots:
    """What the rows ``part`` of a request see within ``span``."""
    mask = span.of(view, request, part)
    if request.committed < len(request.slots):  # those behind are not in order
        order = np.argsort(request.positions, kind="stable")
        mask, slots = mask[:, order], request.slots[order]
    else:
        slots = request.slots
    starts = np.zeros(len(mask) + 1, np.int64)
    np.cumsum(mask.sum(axis=1), out=starts[1:])
    return SeenSlots(request.rows[part], starts, np.broadcast_to(slots, mask.shape)[mask].astype(np.int32))
