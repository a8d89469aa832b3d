"""States over slots: decaying sums in a tree of rows, at once or step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.models.recurrent.plan import FOLD, Part, SlotArrays, TreePlan
from penstock.stage.visibility import ProtocolError

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
    """The state of one layer for all requests."""

    slots: SlotArrays

    def read(self, rows: Rows, plan: TreePlan) -> Tensor:
        """Add the rows, and read their outputs [N, H, e]."""
        ...

    def forget(self, requests: Sequence[int]) -> None:
        """Drop the state of requests that have ended."""
        ...

    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True)
class _Folded:
    """The state after a request's first ``until`` tokens, and the sum of their log decays."""

    until: int
    state_Hde: Tensor
    total_Hc: Tensor


class FoldedState:
    """One triangular solve for each part of a batch, and one state for each request, folded at fixed positions.

    Everything is computed and kept in ``dtype``; outputs have the rows' own. In float64 a row's float32 output does not
    depend on the rows computed beside it, but for one in 10^8.
    """

    def __init__(self, capacity: int, dtype: torch.dtype = torch.float32) -> None:
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
        self.slots.make("added", rows.value_NHe)
        output_NHe = torch.empty_like(rows.value_NHe)
        for part in plan.parts:
            output_NHe[part.rows] = self._read_part(rows.at(part.rows), part)
        return output_NHe.to(given)

    def _read_part(self, rows: Rows, part: Part) -> Tensor:
        query_Hnd, key_Hnd = (_by_head(one, rows.value_NHe.shape[1]) for one in (rows.query_NKd, rows.key_NKd))
        above_Hmd = _by_head(self.slots.get("key", part.above), len(key_Hnd))
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
            added_Hne = _solve(weigh(key_Hnd, keys_Hmd), lacks_Hne, added_Hme, rows.beta_NH.T[..., None])
        self.slots.put("added", part.own, added_Hne.transpose(0, 1))
        read_Hne = weigh(query_Hnd, keys_Hmd) @ torch.cat([added_Hme, added_Hne], dim=1)
        return ((query_Hnd * decay_Hnc) @ folded.state_Hde + read_Hne).transpose(0, 1)

    def _totals(self, decay_nHc: Tensor, part: Part) -> Tensor:
        """The sum of log decays from the text's first row to each of these, float64; also stored in their slots."""
        within = torch.einsum("nm,mhc->nhc", part.run_nn.double(), decay_nHc.double())
        self.slots.make("total", within)
        total_nHc = within + self.slots.get("total", part.top)
        self.slots.put("total", part.own, total_nHc)
        return total_nHc

    def _fold(self, part: Part, rows: Rows) -> _Folded:
        """The state up to the part's base: the state folded before, and the committed rows in slots behind it."""
        folded = self._folded.get(part.request)
        # Nothing has been folded, or more than this part may see: fold again from the beginning.
        if folded is None or folded.until > part.base:
            _, heads, width = rows.value_NHe.shape
            state = rows.value_NHe.new_zeros(heads, rows.key_NKd.shape[2], width)
            folded = _Folded(0, state, rows.decay_NHc.new_zeros(rows.decay_NHc.shape[1:], dtype=torch.float64))
        for first in range(folded.until, part.base, FOLD):
            committed = part.committed[first : first + FOLD]
            if (committed == self.slots.capacity).any():
                raise ProtocolError(f"request {part.request}: what it kept of positions from {first} on is gone")
            folded = self._fold_slots(folded, torch.from_numpy(committed).to(part.own.device))
        self._folded[part.request] = folded
        return folded

    def _fold_slots(self, folded: _Folded, slots: Tensor) -> _Folded:
        total_jHc = self.slots.get("total", slots)
        added_Hje = self.slots.get("added", slots).transpose(0, 1)
        key_Hjd = _by_head(self.slots.get("key", slots), len(added_Hje))
        last_Hc = total_jHc[-1]
        left_Hjc = (last_Hc - total_jHc).exp().to(self._dtype).transpose(0, 1)
        kept_Hc1 = (last_Hc - folded.total_Hc).exp().to(self._dtype)[..., None]
        state_Hde = kept_Hc1 * folded.state_Hde + (key_Hjd * left_Hjc).transpose(1, 2) @ added_Hje
        return _Folded(folded.until + len(slots), state_Hde, last_Hc)


class _Weighing:
    """(left_Hnd, right_Hmd) -> products [H, n, m], decayed from right to left; 0 where left does not see right."""

    def __init__(self, total_nHc: Tensor, total_mHc: Tensor, sees_nm: Tensor) -> None:
        self._total_Hnc, self._total_Hmc = total_nHc.transpose(0, 1), total_mHc.transpose(0, 1)
        self._unseen_nm = ~sees_nm
        self._together = total_nHc.shape[2] == 1
        if self._together:
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
        wanted_Hne = wanted_Hne - weights_Hnm[..., :apart] @ above_Hme
    if rows == 1:
        return wanted_Hne
    return torch.linalg.solve_triangular(weights_Hnm[..., apart:], wanted_Hne, upper=False, unitriangular=True)


def _by_head(one_NKd: Tensor, heads: int) -> Tensor:
    """[N, K, d] -> [H, N, d]: each of the K heads serves H / K consecutive ones."""
    return one_NKd.repeat_interleave(heads // one_NKd.shape[1], dim=1).transpose(0, 1)


# -------------------------------------------------------------------------------------------------------------- stepped
# The slow reference: a state in every slot, computed row by row along the path.


class SteppedState:
    """Computes the same as ``FoldedState``, straight from the definition."""

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
