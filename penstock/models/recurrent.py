"""States over slots: decaying sums in a tree of rows, at once or step by step."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.stage.visibility import BatchView, ProtocolError, RequestView

# ---------------------------------------------------------------------------------------------------------------- pages
# Arrays of zeros that take memory as they are written to: a long context costs nothing until a text is that long.

LAZY: Final = sys.platform == "linux"
"""Whether the operating system gives private pages that were handed back as zeros at the next read, as Linux does."""


class ZeroPages:
    """Zeros [*shape] in ``like``'s format, on its device. On a CPU a page takes memory when it is first written to.

    numpy's and torch's own zeros do not serve: torch writes to all of them, and numpy asks for huge pages.
    """

    def __init__(self, like: Tensor, *shape: int) -> None:
        size = prod(shape) * like.element_size()
        self._pages: mmap.mmap | None = None
        if LAZY and like.device.type == "cpu" and size:
            self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.array = torch.frombuffer(self._pages, dtype=like.dtype).view(shape)
        else:
            self.array = like.new_zeros(shape)

    def clear(self) -> None:
        """Set everything to zero, at the same address, and give the memory back to the operating system."""
        if self._pages is None:
            self.array.zero_()
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)


# ----------------------------------------------------------------------------------------------------------------- plan
# How the rows of one batch depend on each other in state-carrying layers: worked out once, used by every layer.
#
# Shapes: N rows of a batch, n rows of a part, m slots that hold their ancestors above the part.

FOLD: Final = 64
"""Committed tokens that are folded into a request's state at a time, always beginning at a multiple of this number. The
rows above a fold are solved as a triangle, whose cost grows with the square of their number; smaller pieces are folded
more often."""


@dataclass(frozen=True)
class RequestRows:
    """Rows of one request that are computed together, parents first.

          folded: 0 .. base-1             m above           n rows
        | committed, in the state | committed or drafted | 5 <- 6 <- 7
                                                           \\ <- 8          sees_nn[8]: 5 and 8

    ``rows`` [n] are the rows' indices in the batch and ``own`` [n] their slots. ``above`` [m] are the slots of all
    their ancestors from position ``base`` on that are not among them. ``sees_nm`` and ``sees_nn`` say which of those
    slots and rows are a row's ancestors or itself. ``run_nn`` marks the end of a row's path, as far as it lies within
    the part without a gap; ``top`` [n] is the slot right above that run, the number of slots where there is none.
    """

    request: int
    base: int
    committed: np.ndarray
    """Slots of the request's committed tokens, by position."""
    rows: Tensor
    own: Tensor
    above: Tensor
    sees_nm: Tensor
    sees_nn: Tensor
    run_nn: Tensor
    top: Tensor


class TreePlan:
    """Parts and ancestors of a batch. ``capacity`` is the number of slots; as a slot it means that there is none."""

    def __init__(self, view: BatchView, capacity: int, device: torch.device) -> None:
        self.view = view
        self.capacity = capacity
        self.device = device
        self.slots_N = self._tensor(view.slots)
        self._ancestors: dict[int, Tensor] = {}

    def ancestors(self, count: int) -> Tensor:
        """Slots [N, count] of each row's parent, grandparent and so on; ``capacity`` above the text's first row."""
        if count not in self._ancestors:
            self._ancestors[count] = self._tensor(self._above(count))
        return self._ancestors[count]

    @cached_property
    def parts(self) -> list[RequestRows]:
        """All rows in parts, in an order in which no row is computed before its parent."""
        parents = self._above(1)[:, 0]
        return [
            self._part(request, lines, parents)
            for request in self.view.views
            for lines in _lines(self.view.positions[request.rows], request.committed)
        ]

    def _above(self, count: int) -> np.ndarray:
        """``ancestors`` as an array [N, count]."""
        # Without an ancestor a row reads entry ``capacity`` of the arrays, which stays zero.
        found = np.full((len(self.view), count), self.capacity, dtype=np.int64)
        for request in self.view.views:
            own = self.view.positions[request.rows]
            # Ancestors lie at most ``count`` positions above the earliest row: the search skips the text before that.
            near = np.flatnonzero(request.positions >= own.min() - count)
            sees, held = request.mask[:, near], request.positions[near]
            for distance in range(1, count + 1):
                # A row sees one slot at each earlier position, that of its ancestor there.
                is_it = sees & (held == own[:, None] - distance)
                has = is_it.any(axis=1)
                found[request.rows[has], distance - 1] = request.slots[near[is_it[has].argmax(axis=1)]]
        return found

    def _part(self, request: RequestView, lines: np.ndarray, parents: np.ndarray) -> RequestRows:
        rows = request.rows[lines]
        own, mask = self.view.slots[rows], request.mask[lines]
        base = _base(request, self.view.positions[rows])
        column = {slot: i for i, slot in enumerate(request.slots.tolist())}
        # ``column`` maps a slot to its column of the request's mask; ``new`` are the columns of the part's own rows.
        new = np.array([column[slot] for slot in own.tolist()], dtype=np.int64)
        # Slots below ``base`` are in the folded state; the part's own rows have ``sees_nn``.
        seen = mask.any(axis=0) & (request.positions >= base)
        seen[new] = False
        run, top = _runs(own.tolist(), parents[rows].tolist())
        return RequestRows(
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
    # No row may meet a state that holds tokens behind its own parent, so the earliest row limits the fold.
    return min(request.committed, int(positions.min())) // FOLD * FOLD


def _runs(own: list[int], parents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """``Part.run_nn`` and ``Part.top`` of the rows in these slots."""
    # ``run`` as a mask lets a single product with the rows' log decays sum up each run (``FoldedState._totals``).
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

    The last entry stands for the parent of a text's first row: it is never written to and stays zero.
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
            # Only ``before`` entries: the one behind them is no slot, and stays zero at its new place, too.
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
class RowSize:
    """Numbers that a slot holds for a layer: the convolution's input, the row's key and addition, sums of decays."""

    convolution: int
    state: int = 0
    decays: int = 0

    def bytes(self, of_weights: int, of_state: int) -> int:
        """Bytes of a slot.

        ``of_weights`` and ``of_state`` are the bytes of a hidden state's and of a state's number.
        """
        return of_weights * self.convolution + of_state * self.state + DECAY_BYTES * self.decays


def row_size(config: Any) -> RowSize:
    """The numbers of a slot in one layer: Kimi Linear, other gated delta nets, Mamba-2, or a short convolution."""
    if width := _stated(config, "linear_head_dim"):
        inner = width * config.linear_num_heads
        return RowSize(3 * inner, 2 * inner, inner)
    if width := _stated(config, "linear_key_head_dim"):
        keys, heads = width * config.linear_num_key_heads, int(config.linear_num_value_heads)
        values = heads * config.linear_value_head_dim
        return RowSize(2 * keys + values, keys + values, heads)
    if heads := _stated(config, "mamba_num_heads", "mamba_n_heads"):
        keys = _stated(config, "n_groups", "mamba_n_groups") * _stated(config, "ssm_state_size", "mamba_d_state")
        inner = heads * _stated(config, "mamba_head_dim", "mamba_d_head")
        return RowSize(inner + 2 * keys, keys + inner, heads)
    return RowSize(int(config.hidden_size))


def _stated(config: Any, *names: str) -> int:
    """The configuration's value under the first of these names that it has; 0 if it has none."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


# ---------------------------------------------------------------------------------------------------------------- state
# A decaying state that every row adds to, in a tree of rows: what rows add is stored by slot, instead of states.
#
# Per head, row i with parent p(i) makes of its parent's state S, a matrix [d, e],
#
#     S_i = a_i S_p(i) + k_i u_i^T      output_i = S_i^T q_i
#
# where u_i is the row's value or, under the delta rule (Gated Delta Networks, arXiv 2412.06464), the part of it that
# the state lacks: u_i = b_i (v_i - a_i S_p(i)^T k_i). What row i adds, k_i and u_i, does not depend on how often the
# state has been folded since. So a slot stores k_i, u_i and g_i, the sum of log a from the text's first row to i, and
# no state. With S the state after the committed rows up to some position, g_0 their sum, and D_ij = exp(g_i - g_j)
# where j is an ancestor of i or i itself,
#
#     (I + A) U = b (V - exp(g - g_0) K S)      A_ij = b_i D_ij (k_i . k_j) for j other than i
#     O = exp(g - g_0) Q S + (D * Q K^T) U
#
# A is lower triangular, since a parent never comes after its child. Commit and prune move nothing. No exponent is above
# 0. g is kept in float64: its differences stay exact however long the text is.
#
# Shapes: N rows of a batch, n of a part, m above them, H heads of the state, K of keys and queries, d and e the state's
# widths, c the channels that decay apart: 1, or d as in Kimi Linear (arXiv 2510.26692).


class Rows(NamedTuple):
    """The inputs of rows, all in one format.

    ``decay`` (log a) is at most 0; ``beta`` is None without the delta rule.
    """

    query_NKd: Tensor
    key_NKd: Tensor
    value_NHe: Tensor
    decay_NHc: Tensor
    beta_NH: Tensor | None = None

    def at(self, rows_n: Tensor) -> Rows:
        return Rows(*(None if one is None else one.index_select(0, rows_n) for one in self))

    def to(self, dtype: torch.dtype) -> Rows:
        return Rows(*(None if one is None else one.to(dtype) for one in self))


class State(Protocol):
    """One layer's state for all requests: ``FoldedState``, or ``SteppedState`` as its reference."""

    slots: SlotArrays

    def read(self, rows: Rows, plan: TreePlan) -> Tensor:
        """Add the rows, and read their outputs [N, H, e]."""
        ...

    def forget(self, requests: Sequence[int]) -> None:
        """Drop the state of requests that have ended."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of memory that the state takes."""
        ...


@dataclass(frozen=True)
class _Folded:
    """The state after a request's first ``until`` tokens, and the sum of their log decays."""

    until: int
    state_Hde: Tensor
    total_Hc: Tensor


class FoldedState:
    """One triangular solve for each part of a batch, and one state per request, folded every ``FOLD`` positions.

    Everything is computed and kept in ``dtype``; outputs have the rows' own. In float64 a row's float32 output does not
    depend on the rows computed beside it, but for one in 10^8.
    """

    def __init__(self, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        # ``slots`` has three arrays: "key" [K, d], "added" [H, e] (u above) and "total" [H, c] (g above, float64).
        self.slots = SlotArrays(capacity)
        self._dtype = dtype
        self._folded: dict[int, _Folded] = {}

    @property
    def bytes(self) -> int:
        return self.slots.bytes

    def forget(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._folded.pop(request, None)

    def read(self, rows: Rows, plan: TreePlan) -> Tensor:
        given, rows = rows.value_NHe.dtype, rows.to(self._dtype)
        # All keys first: a part reads those of the parts before it.
        self.slots.put("key", plan.slots_N, rows.key_NKd)
        # Additions come part by part, and a part may gather slots before any row of its layer has written one.
        self.slots.make("added", rows.value_NHe)
        output_NHe = torch.empty_like(rows.value_NHe)
        for part in plan.parts:
            output_NHe[part.rows] = self._read_part(rows.at(part.rows), part)
        return output_NHe.to(given)

    def _read_part(self, rows: Rows, part: RequestRows) -> Tensor:
        query_Hnd, key_Hnd = (_by_head(one, rows.value_NHe.shape[1]) for one in (rows.query_NKd, rows.key_NKd))
        above_Hmd = _by_head(self.slots.get("key", part.above), len(key_Hnd))
        # The sums go into the slots first: rows of later parts continue from them.
        total_nHc = self._totals(rows.decay_NHc, part)
        total_mHc = torch.cat([self.slots.get("total", part.above), total_nHc])
        folded = self._fold(part, rows)
        decay_Hnc = (total_nHc - folded.total_Hc).exp().to(self._dtype).transpose(0, 1)
        weigh = _Weighing(total_nHc, total_mHc, torch.cat([part.sees_nm, part.sees_nn], dim=1))
        keys_Hmd = torch.cat([above_Hmd, key_Hnd], dim=1)

        added_Hne = rows.value_NHe.transpose(0, 1)
        added_Hme = self.slots.get("added", part.above).transpose(0, 1)
        if rows.beta_NH is not None:
            lacks_Hne = added_Hne - (key_Hnd * decay_Hnc) @ folded.state_Hde
            # The delta rule: a row adds what the state and its ancestors' additions lack of its value.
            added_Hne = _solve(weigh(key_Hnd, keys_Hmd), lacks_Hne, added_Hme, rows.beta_NH.T[..., None])
        self.slots.put("added", part.own, added_Hne.transpose(0, 1))
        read_Hne = weigh(query_Hnd, keys_Hmd) @ torch.cat([added_Hme, added_Hne], dim=1)
        return ((query_Hnd * decay_Hnc) @ folded.state_Hde + read_Hne).transpose(0, 1)

    def _totals(self, decay_nHc: Tensor, part: RequestRows) -> Tensor:
        """The sum of log decays from the text's first row to each of these, float64; also stored in their slots."""
        # Along a path without a gap the sum is a product with ``run_nn``; the slot on top has the sum up to there.
        within = torch.einsum("nm,mhc->nhc", part.run_nn.double(), decay_nHc.double())
        self.slots.make("total", within)
        total_nHc = within + self.slots.get("total", part.top)
        self.slots.put("total", part.own, total_nHc)
        return total_nHc

    def _fold(self, part: RequestRows, rows: Rows) -> _Folded:
        """The state up to the part's base: the state folded before, and the committed rows in slots behind it."""
        folded = self._folded.get(part.request)
        # Nothing has been folded, or more than this part may see: fold again from the beginning.
        if folded is None or folded.until > part.base:
            _, heads, width = rows.value_NHe.shape
            state = rows.value_NHe.new_zeros(heads, rows.key_NKd.shape[2], width)
            folded = _Folded(0, state, rows.decay_NHc.new_zeros(rows.decay_NHc.shape[1:], dtype=torch.float64))
        for first in range(folded.until, part.base, FOLD):
            committed = part.committed[first : first + FOLD]
            # A slot that was given away has the number ``capacity`` here: its contents may be another row's by now.
            if (committed == self.slots.capacity).any():
                raise ProtocolError(f"request {part.request}: what it kept of positions from {first} on is gone")
            folded = self._fold_slots(folded, torch.from_numpy(committed).to(part.own.device))
        self._folded[part.request] = folded
        return folded

    def _fold_slots(self, folded: _Folded, slots: Tensor) -> _Folded:
        total_jHc = self.slots.get("total", slots)
        added_Hje = self.slots.get("added", slots).transpose(0, 1)
        key_Hjd = _by_head(self.slots.get("key", slots), len(added_Hje))
        # With g of the last folded row as the new reference, each exponent is a difference of sums, and at most 0.
        last_Hc = total_jHc[-1]
        left_Hjc = (last_Hc - total_jHc).exp().to(self._dtype).transpose(0, 1)
        kept_Hc1 = (last_Hc - folded.total_Hc).exp().to(self._dtype)[..., None]
        state_Hde = kept_Hc1 * folded.state_Hde + (key_Hjd * left_Hjc).transpose(1, 2) @ added_Hje
        return _Folded(folded.until + len(slots), state_Hde, last_Hc)


class _Weighing:
    """Products [H, n, m] of (left_Hnd, right_Hmd), decayed from right to left; 0 where left does not see right."""

    def __init__(self, total_nHc: Tensor, total_mHc: Tensor, sees_nm: Tensor) -> None:
        self._total_Hnc, self._total_Hmc = total_nHc.transpose(0, 1), total_mHc.transpose(0, 1)
        self._unseen_nm = ~sees_nm
        self._together = total_nHc.shape[2] == 1
        if self._together:
            # Masking comes before exp: of an unseen pair the difference may be positive and overflow.
            apart_Hnm = self._total_Hnc - self._total_Hmc.transpose(1, 2)
            self._decay_Hnm = apart_Hnm.masked_fill(self._unseen_nm, -torch.inf).exp()

    def __call__(self, left_Hnd: Tensor, right_Hmd: Tensor) -> Tensor:
        if self._together:
            return self._decay_Hnm.to(left_Hnd.dtype) * (left_Hnd @ right_Hmd.transpose(1, 2))
        return torch.stack([self._of_head(*pair) for pair in enumerate(zip(left_Hnd, right_Hmd, strict=True))])

    def _of_head(self, head: int, pair: tuple[Tensor, Tensor]) -> Tensor:
        """The products of one head whose channels decay apart. One head at a time, since [n, m, d] is large."""
        left_nd, right_md = pair
        apart_nmd = self._total_Hnc[head][:, None] - self._total_Hmc[head][None]
        decay_nmd = apart_nmd.masked_fill(self._unseen_nm[..., None], -torch.inf).exp().to(left_nd.dtype)
        return torch.einsum("nd,nmd,md->nm", left_nd, decay_nmd, right_md)


def _solve(products_Hnm: Tensor, lacks_Hne: Tensor, above_Hme: Tensor, beta_Hn1: Tensor) -> Tensor:
    """The rows' additions under the delta rule, by forward substitution. The last n of the m columns are the rows."""
    apart, rows = above_Hme.shape[1], lacks_Hne.shape[1]
    weights_Hnm = beta_Hn1 * products_Hnm
    wanted_Hne = beta_Hn1 * lacks_Hne
    if apart:
        # What the ancestors above have added is known already, and moves to the right side of the equation.
        wanted_Hne = wanted_Hne - weights_Hnm[..., :apart] @ above_Hme
    if rows == 1:
        return wanted_Hne
    # ``unitriangular`` ignores the diagonal, which holds b_i (k_i . k_i) and counts as 1: I + A in the equation above.
    return torch.linalg.solve_triangular(weights_Hnm[..., apart:], wanted_Hne, upper=False, unitriangular=True)


def _by_head(one_NKd: Tensor, heads: int) -> Tensor:
    """[N, K, d] -> [H, N, d]: each of the K heads serves H / K consecutive ones."""
    return one_NKd.repeat_interleave(heads // one_NKd.shape[1], dim=1).transpose(0, 1)


# -------------------------------------------------------------------------------------------------------------- stepped
# The slow reference: a state in every slot, computed row by row along the path.


class SteppedState:
    """Computes the same as ``FoldedState``, row by row as the equations above state it; every slot holds a state."""

    def __init__(self, capacity: int) -> None:
        self.slots = SlotArrays(capacity)

    @property
    def bytes(self) -> int:
        return self.slots.bytes

    def forget(self, requests: Sequence[int]) -> None:
        """Do nothing: slots are overwritten when they are used again."""

    def read(self, rows: Rows, plan: TreePlan) -> Tensor:
        count, heads, width = rows.value_NHe.shape
        query_NHd, key_NHd = (
            one.repeat_interleave(heads // one.shape[1], dim=1) for one in (rows.query_NKd, rows.key_NKd)
        )
        self.slots.make("state", rows.value_NHe.new_zeros(0, heads, key_NHd.shape[2], width))
        output_NHe = torch.empty_like(rows.value_NHe)
        parents = plan.ancestors(1)
        for i in range(count):
            state_Hde = self.slots.get("state", parents[i])[0] * rows.decay_NHc[i].exp()[..., None]
            added_He = rows.value_NHe[i]
            if rows.beta_NH is not None:
                held_He = torch.einsum("hde,hd->he", state_Hde, key_NHd[i])
                added_He = rows.beta_NH[i][:, None] * (added_He - held_He)
            state_Hde = state_Hde + key_NHd[i][..., None] * added_He[:, None]
            self.slots.put("state", plan.slots_N[i : i + 1], state_Hde[None])
            output_NHe[i] = torch.einsum("hde,hd->he", state_Hde, query_NHd[i])
        return output_NHe
