"""A batch's rows in layers that carry a state: how they depend on each other, and where states are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from penstock.models.pages import ZeroPages
from penstock.stage.visibility import BatchView, RequestView

# ----------------------------------------------------------------------------------------------------------------- plan
# How the rows of one batch depend on each other in state-carrying layers: worked out once, used by every layer.
#
# Shapes: N rows of a batch, n rows of a part, m slots that hold their ancestors above the part.

FOLD: Final = 64
"""How many committed tokens are folded into a request's state at a time, always from a multiple of it on."""


@dataclass(frozen=True)
class Part:
    """Rows of one request that are computed together, parents first.

          folded: 0 .. base-1             m above           n rows
        | committed, in the state | committed or drafted | 5 <- 6 <- 7
                                                           \\ <- 8          sees_nn[8]: 5 and 8

    ``rows`` [n] are their places in the batch and ``own`` [n] their slots. ``above`` [m] are the slots of all their
    ancestors from position ``base`` on that are not among them. ``sees_nm`` and ``sees_nn`` say which of those slots
    and rows are a row's ancestors or itself. ``run_nn`` is the end of a row's path that lies within the part without a
    gap, and ``top`` [n] the slot right above that; the number of slots where there is none.
    """

    request: int
    base: int
    committed: np.ndarray
    """Slots of the committed tokens, by position."""
    rows: Tensor
    own: Tensor
    above: Tensor
    sees_nm: Tensor
    sees_nn: Tensor
    run_nn: Tensor
    top: Tensor


class TreePlan:
    """Parts and ancestors of a batch. ``capacity`` is the number of slots; index ``capacity`` stands for no slot."""

    def __init__(self, view: BatchView, capacity: int, device: torch.device) -> None:
        self.view = view
        self.capacity = capacity
        self.device = device
        self.slots_N = self._tensor(view.slots)
        self._ancestors: dict[int, Tensor] = {}

    def ancestors(self, count: int) -> Tensor:
        """Slots [N, count] of each row's parent, its parent's parent, and so on."""
        if count not in self._ancestors:
            self._ancestors[count] = self._tensor(self._above(count))
        return self._ancestors[count]

    @cached_property
    def parts(self) -> list[Part]:
        """All rows in parts, in an order in which parents are computed first."""
        parents = self._above(1)[:, 0]
        return [
            self._part(request, lines, parents)
            for request in self.view.views
            for lines in _lines(self.view.positions[request.rows], request.committed)
        ]

    def _above(self, count: int) -> np.ndarray:
        # Without an ancestor a row reads entry ``capacity`` of the arrays, which stays zero.
        found = np.full((len(self.view), count), self.capacity, dtype=np.int64)
        for request in self.view.views:
            own = self.view.positions[request.rows]
            near = np.flatnonzero(request.positions >= own.min() - count)
            sees, held = request.mask[:, near], request.positions[near]
            for distance in range(1, count + 1):
                is_it = sees & (held == own[:, None] - distance)
                has = is_it.any(axis=1)
                found[request.rows[has], distance - 1] = request.slots[near[is_it[has].argmax(axis=1)]]
        return found

    def _part(self, request: RequestView, lines: np.ndarray, parents: np.ndarray) -> Part:
        rows = request.rows[lines]
        own, mask = self.view.slots[rows], request.mask[lines]
        base = _base(request, self.view.positions[rows])
        column = {slot: i for i, slot in enumerate(request.slots.tolist())}
        new = np.array([column[slot] for slot in own.tolist()], dtype=np.int64)
        seen = mask.any(axis=0) & (request.positions >= base)
        seen[new] = False
        run, top = _runs(own.tolist(), parents[rows].tolist())
        return Part(
            request=request.request,
            base=base,
            committed=request.slots[: request.committed],
            rows=self._tensor(rows),
            own=self._tensor(own),
            above=self._tensor(request.slots[seen]),
            sees_nm=self._tensor(mask[:, seen]),
            sees_nn=self._tensor(mask[:, new]),
            run_nn=self._tensor(run),
            top=self._tensor(top),
        )

    def _tensor(self, array: np.ndarray) -> Any:
        return torch.from_numpy(array).to(self.device)


def _lines(positions: np.ndarray, committed: int) -> Iterator[np.ndarray]:
    """A request's rows in parts of at most ``FOLD``. A committed row begins a new part wherever a fold may end.

    How a long prompt is cut into batches therefore makes no difference to the folds.
    """
    first = 0
    for line, position in enumerate(positions.tolist()):
        may_end = position % FOLD == 0 and position < committed
        if line > first and (may_end or line - first == FOLD):
            yield np.arange(first, line)
            first = line
    yield np.arange(first, len(positions))


def _base(request: RequestView, positions: np.ndarray) -> int:
    """The position up to which everything is folded for rows at these positions."""
    return min(request.committed, int(positions.min())) // FOLD * FOLD


def _runs(own: list[int], parents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """``Part.run_nn`` and ``Part.top`` of the rows in these slots."""
    run, top = np.zeros((len(own), len(own)), dtype=bool), np.empty(len(own), dtype=np.int64)
    line = {slot: i for i, slot in enumerate(own)}
    # Parents come first, so a row's run is its parent's run and itself.
    for i, parent in enumerate(parents):
        above = line.get(parent)
        if above is None:
            top[i] = parent
        else:
            run[i], top[i] = run[above], top[above]
        run[i, i] = True
    return run, top


# ---------------------------------------------------------------------------------------------------------------- slots
# Arrays of everything that a state-carrying layer stores for each row, by slot.


class SlotArrays:
    """Arrays [capacity + 1, ..] by name, made, zeroed, when first needed.

    The last entry stands for the place above the first row of a text. It stays zero.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pages: dict[str, ZeroPages] = {}

    @property
    def arrays(self) -> list[Tensor]:
        return [pages.array for pages in self._pages.values()]

    @property
    def bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.arrays)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` slots. Slots that exist keep their contents."""
        before, self.capacity = self.capacity, capacity
        for name, pages in self._pages.items():
            self._pages[name] = ZeroPages(pages.array, capacity + 1, *pages.array.shape[1:])
            self._pages[name].array[:before] = pages.array[:before]

    def make(self, name: str, like: Tensor) -> None:
        """Make an array with entries like those of ``like`` [N, ..], unless it exists."""
        if name not in self._pages:
            self._pages[name] = ZeroPages(like, self.capacity + 1, *like.shape[1:])

    def put(self, name: str, slots_N: Tensor, values: Tensor) -> None:
        """Store ``values`` [N, ..]. NaN becomes 0: it would reach other rows through masked sums."""
        self.make(name, values)
        self._pages[name].array.index_copy_(0, slots_N, values.nan_to_num())

    def get(self, name: str, slots: Tensor) -> Tensor:
        """The entries of ``slots``, which may have any shape: [*slots.shape, ..]."""
        array = self._pages[name].array
        return array.index_select(0, slots.reshape(-1)).view(*slots.shape, *array.shape[1:])

    def zero(self) -> None:
        for pages in self._pages.values():
            pages.clear()


# --------------------------------------------------------------------------------------------------------------- widths
# How much a state-carrying layer stores for each row, from the configuration alone.

DECAY_BYTES: Final = 8
"""Bytes of a sum of log decays, which is float64 in every format."""


@dataclass(frozen=True)
class Kept:
    """How many numbers a slot holds: the convolution's input, the row's key and addition, its sums of log decays."""

    convolution: int
    state: int = 0
    decays: int = 0

    def bytes(self, of_weights: int, of_state: int) -> int:
        """Bytes for a row.

        ``of_weights`` and ``of_state`` are the bytes of a hidden state's and of a state's number.
        """
        return of_weights * self.convolution + of_state * self.state + DECAY_BYTES * self.decays


def kept(config: Any) -> Kept:
    """The numbers of one row in one layer: Kimi Linear, other gated delta nets, Mamba-2, or a short convolution."""
    if width := _stated(config, "linear_head_dim"):
        inner = width * config.linear_num_heads
        return Kept(3 * inner, 2 * inner, inner)
    if width := _stated(config, "linear_key_head_dim"):
        keys, heads = width * config.linear_num_key_heads, int(config.linear_num_value_heads)
        values = heads * config.linear_value_head_dim
        return Kept(2 * keys + values, keys + values, heads)
    if heads := _stated(config, "mamba_num_heads", "mamba_n_heads"):
        keys = _stated(config, "n_groups", "mamba_n_groups") * _stated(config, "ssm_state_size", "mamba_d_state")
        inner = heads * _stated(config, "mamba_head_dim", "mamba_d_head")
        return Kept(inner + 2 * keys, keys + inner, heads)
    return Kept(int(config.hidden_size))


def _stated(config: Any, *names: str) -> int:
    """The configuration's value under the first of these names that it has; 0 if it has none."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)
