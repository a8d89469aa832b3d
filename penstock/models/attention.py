"""Attention over slots: full, with a sliding window, and in chunks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.architectures import RECURRENT_TYPES, layer_types
from penstock.models.recurrent import FOLD, ZeroPages
from penstock.stage.visibility import BatchView, RequestView

# ------------------------------------------------------------------------------------------------------------ attention
# Attention over slots: every row attends to its ancestors, wherever their keys and values were stored.
#
# Shapes: N rows of a batch, n rows of one request, S slots that these see, H query heads in K groups of G = H / K, d
# and e the widths of keys and values (they differ under MLA). An arena holds one layer's keys [K, capacity, d] or
# values [K, capacity, e]; RoPE has been applied, so the order of slots means nothing.

ATTENTION: Final = "penstock"
"""The name under which transformers finds ``_dispatch``."""

WIDEST_SLICE: Final = 1.5
"""Widest slice of an arena that is read in place, as a multiple of the slots seen; with wider ones slots are gathered.

Measured in float32 on a CPU: gathering S slots costs what reading S / 2 more does.
"""

MOST_SCORES: Final = 1 << 20
"""Largest product of rows and slots that attend at once; with 32 heads the scores take 128 MiB in float32."""

LEAST_SPLIT: Final = 1024
"""The fewest slots that attention on a GPU computes in parts; see ``_in_parts``.

Measured on an H200 with 8 key heads of width 128 in bfloat16, 4 to 256 query rows a key head, microseconds a layer in
one piece and in parts: 512 slots 16 to 18 and 23 to 27, 2,048 slots 45 to 54 and 26 to 40, 8,192 slots 165 to 204 and
39 to 105, 32,768 slots 670 to 805 and 83 to 415.
"""
SHORT_PART: Final = 256
LONG_PART: Final = 512
"""Most slots of a part: ``SHORT_PART`` for requests of up to ``LONG`` slots, ``LONG_PART`` for longer ones. Shorter
parts leave more results to be joined, longer ones fewer parts than a GPU computes at once."""
LONG: Final = 4096
"""Slots of a request up to which its parts are short: it then has up to 16 of them."""

Attend = Callable[..., Tensor]
"""(module, query_HNd, key_KNd, value_KNe, attention_mask, **options) -> output_NHe"""

_attend: ContextVar[Attend] = ContextVar("penstock_attend")


def _dispatch(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer. Its tensors have a leading axis of one sequence.

    Like transformers' own, it returns a contiguous tensor: some layers take a view of it.
    """
    return attend(module, query[0], key[0], value[0], attention_mask, **options)[None].contiguous(), None


def attend(module: Any, *arguments: Any, **options: Any) -> Tensor:
    """Answer a layer's attention call with the function set by ``attending``. The arguments are those of ``Attend``."""
    return _attend.get()(module, *arguments, **options)


def chosen(modules: Sequence[Any], sliding_window: int | None) -> Any:
    """The object that compiled layers of one window attend with: they compute attention within their own loops."""
    answering: Any = _attend.get()
    return answering.chosen(modules, sliding_window)


@cache
def plug_in() -> None:
    """Let transformers' modules find ``_dispatch`` under its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _dispatch)


@contextlib.contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within the block, ``attend`` answers the attention calls of this thread."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


class Arenas:
    """Keys and values of every layer of a stage, by slot. A layer's arena is made, zeroed, when it first stores.

    ``made_by`` maps each layer without keys and values of its own to the layer whose keys and values it reads.
    """

    def __init__(self, capacity: int, made_by: Mapping[int, int] | None = None) -> None:
        self.capacity = capacity
        self.made_by = made_by or {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._pages: dict[int, list[ZeroPages]] = {}
        self._joint: dict[int, Tensor] = {}
        """The two arenas of a layer as one tensor [2 K, capacity, d], where keys and values have the same shape."""

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def store(
        self, layer: int, slots_N: Tensor, key_KNd: Tensor, value_KNe: Tensor, joint_XNd: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values in their slots; returns the layer's arenas [K, capacity, d] and [.., e].

        ``joint_XNd`` holds keys and values in one tensor, where the layer has them so: one copy then stores both.
        """
        keys, values = self.of(layer, key_KNd, value_KNe)
        stored = [(keys, key_KNd), (values, value_KNe)] if joint_XNd is None else [(self._joint[layer], joint_XNd)]
        for arena, rows in stored:
            # float16 can overflow. A masked NaN still poisons a sum, so none may get into an arena that another row
            # reads.
            arena.index_copy_(1, slots_N, rows.nan_to_num() if rows.dtype == torch.float16 else rows)
        return keys, values

    def of(self, layer: int, key_KNd: Tensor, value_KNe: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's arenas [K, capacity, d] and [K, capacity, e], made in the shape of these keys and values if new."""
        if layer not in self._layers:
            self._make(layer, key_KNd, value_KNe)
        return self._layers[layer]

    @torch.inference_mode()  # arenas may have been made in it, and are then changed only in it
    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` slots. Slots that exist keep their contents."""
        if capacity == self.capacity:
            return
        before, self.capacity = self.capacity, capacity
        for layer, pair in list(self._layers.items()):
            self._make(layer, *pair)
            # A slot's number is its index on axis 1 of every arena: what was stored stays at the front.
            for arena, old in zip(self._layers[layer], pair, strict=True):
                arena[:, :before] = old

    @torch.inference_mode()  # as above
    def zero(self) -> None:
        """Set every slot of every layer to zero; the arenas stay at their addresses."""
        for pages in itertools.chain.from_iterable(self._pages.values()):
            pages.clear()

    def _make(self, layer: int, key_KNd: Tensor, value_KNe: Tensor) -> None:
        groups, _, width = key_KNd.shape
        # Keys and values of one shape share a tensor, so that ``store`` can write both with one copy.
        if key_KNd.shape == value_KNe.shape:
            pages = [ZeroPages(key_KNd, 2 * groups, self.capacity, width)]
            joint = self._joint[layer] = pages[0].array
            self._layers[layer] = joint[:groups], joint[groups:]
        else:
            pages = [ZeroPages(like, groups, self.capacity, like.shape[2]) for like in (key_KNd, value_KNe)]
            self._layers[layer] = pages[0].array, pages[1].array
        self._pages[layer] = pages


@dataclass
class Segment:
    """Rows that attend together. ``columns`` picks their slots out of an arena: a slice of it, or a gather.

    slots 7 4 9 5 (in position order)  ->  arena[4:10], mask columns 4 5 . 7 . 9; slots 6 and 8 belong to others: masked
    """

    rows: slice | Tensor
    columns: slice | Tensor
    mask_nS: Tensor
    _bias: dict[tuple[int, float], Tensor] = field(default_factory=dict)

    def read(self, arena: Tensor) -> Tensor:
        """The segment's slots [K, S, ..] of an arena [K, capacity, ..]."""
        # index_select is three times as fast as arena[:, columns].
        return arena[:, self.columns] if isinstance(self.columns, slice) else arena.index_select(1, self.columns)

    def bias_RS(self, groups: int, dtype: torch.dtype, unseen: float = -torch.inf) -> Tensor:
        """The mask as a summand (0 or ``unseen``), repeated for R = groups * n query rows.

        Made once, since all layers use it.
        """
        if (groups, unseen) not in self._bias:
            # Query row g * n + i of a key head is row i of its g-th query head, as ``folded_kernel`` lays them out.
            bias_nS = torch.zeros(self.mask_nS.shape, dtype=dtype, device=self.mask_nS.device)
            bias_nS.masked_fill_(~self.mask_nS, unseen)
            self._bias[groups, unseen] = bias_nS.repeat(groups, 1)
        return self._bias[groups, unseen]


class Span(NamedTuple):
    """How far a layer looks back: over the last ``window`` positions, or since the last multiple of ``chunk``."""

    window: int | None = None
    chunk: int | None = None

    def of(self, view: BatchView, request: RequestView, part: slice) -> np.ndarray:
        """The slots of a request that its rows ``part`` see within the span, as a mask, bool [n, S]."""
        mask, own = request.mask[part], view.positions[request.rows[part], None]
        # The row itself counts: with a window of w it sees positions own - w + 1 to own, as in transformers.
        if self.window is not None:
            mask = mask & (own - request.positions[None, :] < self.window)
        if self.chunk is not None:
            mask = mask & (own // self.chunk == request.positions[None, :] // self.chunk)
        return mask


EVERYTHING: Final = Span()


class Planned(Protocol):
    """The slots that the rows of a batch attend to, as attention asks for them."""

    @property
    def slots_N(self) -> Tensor:
        """The slot of each row."""
        ...

    @property
    def positions_N(self) -> Tensor:
        """The position of each row."""
        ...

    def segments(self, span: Span) -> list[Segment]:
        """Rows that attend together, for layers that look back so far."""
        ...


class Plan:
    """The slots that the rows of one batch attend to, worked out once per batch and span, and used by every layer.

    With ``in_place``, slots that lie close together are read as a slice of the arena instead of being gathered.
    """

    def __init__(self, view: BatchView, device: torch.device, in_place: bool) -> None:
        self.view = view
        self.device = device
        self.in_place = in_place
        self.slots_N = torch.from_numpy(view.slots).to(device)
        self._segments: dict[Span, list[Segment]] = {}

    @cached_property
    def positions_N(self) -> Tensor:
        return self._tensor(self.view.positions)

    def segments(self, span: Span) -> list[Segment]:
        """The segments of the batch, request by request."""
        if span not in self._segments:
            self._segments[span] = [
                self._segment(request, part, span) for request in self.view.views for part in parts_of(request)
            ]
        return self._segments[span]

    def _segment(self, request: RequestView, part: slice, span: Span) -> Segment:
        rows, slots, mask = request.rows[part], request.slots, span.of(self.view, request, part)
        # With a span, or with a part of the rows, some slots may be seen by nobody: leave them out.
        if span != EVERYTHING or len(rows) < len(request.rows):
            seen = mask.any(axis=0)
            slots, mask = slots[seen], mask[:, seen]
        columns, mask = _columns(slots, mask) if self.in_place else (slots, mask)
        return Segment(self._index(_rows(rows)), self._index(columns), self._tensor(mask))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _index(self, index: slice | np.ndarray) -> slice | Tensor:
        return index if isinstance(index, slice) else self._tensor(index)


def parts_of(request: RequestView) -> list[slice]:
    """Slices of a request's rows. A long prompt is cut, so that the scores of a layer stay within MOST_SCORES."""
    most = max(1, MOST_SCORES // len(request.slots))
    return [slice(start, start + most) for start in range(0, len(request.rows), most)]


def _columns(slots: np.ndarray, mask: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
    """A slice of the arena instead of a gather, where the slots are so close together that it is cheaper to read."""
    low, high = int(slots.min()), int(slots.max()) + 1
    if high - low > WIDEST_SLICE * len(slots):
        return slots, mask
        # Column c of the slice is slot low + c; slots in between belong to other requests or to nobody: unseen.
    placed = np.zeros((len(mask), high - low), dtype=bool)
    placed[:, slots - low] = mask
    return slice(low, high), placed


def _rows(rows: np.ndarray) -> slice | np.ndarray:
    """The rows, which ascend, as a slice where they are consecutive: a slice reads in place."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if int(rows[-1]) - first + 1 == len(rows) else rows


@dataclass(frozen=True)
class Scoring:
    """How a layer turns products into scores: its scale, gemma's soft cap, gpt_oss's sinks (one logit per head)."""

    scaling: float
    softcap: float | None = None
    sinks_H: Tensor | None = None


Kernel = Callable[[Tensor, Tensor, Tensor, Segment, Scoring], Tensor]
"""(query_Hnd, keys_KSd, values_KSe, segment, scoring) -> output_Hne"""


class SlotAttention:
    """Answers one batch's attention calls: stores the rows' keys and values, then attends segment by segment."""

    def __init__(self, arenas: Arenas, plan: Planned, kernel: Kernel) -> None:
        self.arenas = arenas
        self.plan = plan
        self.kernel = kernel
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        """The arenas of the layers that have stored this batch's keys and values: other layers may read them, too."""

    def __call__(
        self,
        module: Any,
        query_HNd: Tensor,
        key_KNd: Tensor,
        value_KNe: Tensor,
        attention_mask: None,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        joint: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        layer = self.arenas.made_by.get(module.layer_idx, module.layer_idx)
        # Layers that read another layer's keys and values find them stored. Where their maker is on an earlier stage,
        # the first of them stores what the rows have carried.
        if layer not in self._stored:
            self._stored[layer] = self.arenas.store(layer, self.plan.slots_N, key_KNd, value_KNe, joint)
        keys, values = self._stored[layer]
        scoring = Scoring(scaling, softcap, s_aux)
        growth = getattr(module, "growth", None)
        if growth is not None:
            query_HNd = query_HNd * growth.of(self.plan.positions_N)[:, None].to(query_HNd.dtype)
        return self.attended(query_HNd, keys, values, scoring, Span(sliding_window, getattr(module, "chunk", None)))

    def chosen(self, modules: Sequence[Any], sliding_window: int | None) -> SlotAttention:
        """See ``attention.chosen``."""
        return self

    def attended(self, query_HNd: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, span: Span) -> Tensor:
        """The output of the batch's attention over a layer's arenas: [N, H, e]."""
        segments = self.plan.segments(span)
        # The usual batch of one request needs no copy into a joint output.
        if len(segments) == 1:
            (segment,) = segments
            return self.kernel(query_HNd, segment.read(keys), segment.read(values), segment, scoring).transpose(0, 1)
        output_NHe = query_HNd.new_empty(0)
        for segment in segments:
            keys_KSd, values_KSe = segment.read(keys), segment.read(values)
            output_Hne = self.kernel(query_HNd[:, segment.rows], keys_KSd, values_KSe, segment, scoring)
            if not output_NHe.numel():  # only the kernel knows the output's width
                # [::2] of [H, n, e] are H and e.
                output_NHe = output_Hne.new_empty(query_HNd.shape[1], *output_Hne.shape[::2])
            output_NHe[segment.rows] = output_Hne.transpose(0, 1)
        return output_NHe


def fast_attention(arenas: Arenas, plan: Planned, dtype: torch.dtype) -> SlotAttention:
    """The fastest attention for a batch in this format."""
    return SlotAttention(arenas, plan, folded_kernel if dtype == torch.float32 else flash_kernel)


def folded_kernel(
    query_Hnd: Tensor, keys_KSd: Tensor, values_KSe: Tensor, segment: Segment, scoring: Scoring
) -> Tensor:
    """The fast kernel. The G query heads of a key head become rows of one product, so that no key is repeated."""
    heads, rows, width = query_Hnd.shape
    # Query head k * G + g reads key head k, so that a reshape alone brings a key head's queries together.
    groups = heads // len(keys_KSd)
    query_KRd = query_Hnd.reshape(len(keys_KSd), groups * rows, width)
    bias_RS = segment.bias_RS(groups, query_Hnd.dtype)
    if scoring.softcap is None:
        scores_KRS = torch.baddbmm(bias_RS[None], query_KRd, keys_KSd.transpose(1, 2), alpha=scoring.scaling)
    else:
        # The soft cap comes between the scale and the mask, which ``baddbmm`` would apply together.
        scores_KRS = torch.bmm(query_KRd, keys_KSd.transpose(1, 2)) * (scoring.scaling / scoring.softcap)
        scores_KRS = torch.tanh(scores_KRS) * scoring.softcap + bias_RS
    sinks_KR = None if scoring.sinks_H is None else scoring.sinks_H.repeat_interleave(rows).view(len(keys_KSd), -1)
    chances_KRS = _softmax(scores_KRS, sinks_KR)
    return torch.bmm(chances_KRS, values_KSe).view(heads, rows, values_KSe.shape[2])


def flash_kernel(query_Hnd: Tensor, keys_KSd: Tensor, values_KSe: Tensor, segment: Segment, scoring: Scoring) -> Tensor:
    """``folded_kernel`` for half precision: torch's own attention computes the scores in float32.

    ``folded_kernel`` rounds them to the format of its tensors, for 2 to 10 times the error. Measured on a CPU with one
    row over 200 slots and bfloat16: 33 microseconds a layer, where three products take 75.
    """
    if scoring.softcap is not None or scoring.sinks_H is not None:
        if query_Hnd.device.type == "cpu":
            # A batched half-precision product copies what is not contiguous, more slowly than ``contiguous`` does.
            keys_KSd, values_KSe = keys_KSd.contiguous(), values_KSe.contiguous()
        return folded_kernel(query_Hnd, keys_KSd, values_KSe, segment, scoring)
    heads, rows, width = query_Hnd.shape
    groups = heads // len(keys_KSd)
    query_KRd = query_Hnd.reshape(len(keys_KSd), groups * rows, width)
    if query_Hnd.is_cuda and (part := part_of(keys_KSd.shape[1])):
        output_KRe = _in_parts(query_KRd, keys_KSd, values_KSe, segment, scoring.scaling, part)
        return output_KRe.reshape(heads, rows, values_KSe.shape[2])
    mask_RS = segment.bias_RS(groups, query_Hnd.dtype)
    output_KRe = F.scaled_dot_product_attention(
        query_KRd[None], keys_KSd[None], values_KSe[None], attn_mask=mask_RS, scale=scoring.scaling
    )
    return output_KRe.reshape(heads, rows, values_KSe.shape[2])


def part_of(slots: int) -> int:
    """Slots of each part of ``_in_parts``, a divisor of ``slots``; 0 where slots are few or no divisor fits."""
    most = SHORT_PART if slots <= LONG else LONG_PART
    parts = range(most, most // 4, -8)  # torch's attention reads a mask eight numbers at a time
    return next((part for part in parts if slots % part == 0), 0) if slots >= LEAST_SPLIT else 0


def _in_parts(
    query_KRd: Tensor, keys_KSd: Tensor, values_KSe: Tensor, segment: Segment, scale: float, part: int
) -> Tensor:
    """Attention over ``part`` slots at a time, all parts side by side; returns their outputs' weighted mean [K, R, e].

    A GPU has more processors than a layer has key heads, and computes each of them on one. A part's weight in the mean
    is the sum of its exponentials, whose logarithm torch's attention returns.

    Source: Flash-Decoding (Dao et al., 2023).
    """
    groups, rows, width = query_KRd.shape
    keys_KCPd, values_KCPe = (one.unflatten(1, (-1, part)) for one in (keys_KSd, values_KSe))
    parts = keys_KCPd.shape[1]
    # Not -inf: a row may see nothing of a part, whose weight is then 0, while its own output has to be a number.
    bias_RS = segment.bias_RS(rows // len(segment.mask_nS), query_KRd.dtype, torch.finfo(query_KRd.dtype).min / 2)
    bias_CRP = bias_RS.view(rows, parts, part).transpose(0, 1)
    query_KCRd = query_KRd[:, None].expand(groups, parts, rows, width)
    bias_KCRP = bias_CRP[None].expand(groups, parts, rows, part)
    attended = query_KCRd, keys_KCPd, values_KCPe
    if query_KRd.is_cuda:
        output_KCRe, logarithm_KCR, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *attended, bias_KCRP, compute_log_sumexp=True, scale=scale
        )
    else:
        output_KCRe, logarithm_KCR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *attended, attn_mask=bias_KCRP, scale=scale
        )
    weight_KCR = logarithm_KCR[..., :rows].softmax(dim=1)  # torch pads the rows
    return torch.einsum("kcr,kcre->kre", weight_KCR, output_KCRe.float()).to(query_KRd.dtype)


def precise_kernel(
    query_Hnd: Tensor, keys_KSd: Tensor, values_KSe: Tensor, segment: Segment, scoring: Scoring
) -> Tensor:
    """``folded_kernel`` in float64, rounded back: another order of its sums changes one float32 result in 10^8."""
    sinks_H = None if scoring.sinks_H is None else scoring.sinks_H.double()
    exact = Scoring(scoring.scaling, scoring.softcap, sinks_H)
    found = folded_kernel(query_Hnd.double(), keys_KSd.double(), values_KSe.double(), segment, exact)
    return found.to(query_Hnd.dtype)


def plain_kernel(query_Hnd: Tensor, keys_KSd: Tensor, values_KSe: Tensor, segment: Segment, scoring: Scoring) -> Tensor:
    """The reference kernel: keys and values repeated for every query head, a boolean mask, torch's own attention."""
    heads, rows, _ = query_Hnd.shape
    keys_HSd, values_HSe = (t.repeat_interleave(heads // len(t), dim=0) for t in (keys_KSd, values_KSe))
    if scoring.softcap is None and scoring.sinks_H is None:
        mask, scale = segment.mask_nS, scoring.scaling
        return F.scaled_dot_product_attention(query_Hnd, keys_HSd, values_HSe, attn_mask=mask, scale=scale)
    scores_HnS = query_Hnd @ keys_HSd.transpose(1, 2) * scoring.scaling
    if scoring.softcap is not None:
        scores_HnS = torch.tanh(scores_HnS / scoring.softcap) * scoring.softcap
    scores_HnS = scores_HnS.masked_fill(~segment.mask_nS, -torch.inf)
    sinks_Hn = None if scoring.sinks_H is None else scoring.sinks_H[:, None].expand(heads, rows)
    return _softmax(scores_HnS, sinks_Hn) @ values_HSe


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax in at least float32 over the last axis; a sink takes its share of the mass and gives no value back."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(dim=-1, dtype=dtype).to(scores.dtype)
    with_sink = torch.cat([scores, sinks[..., None].to(scores.dtype)], dim=-1)
    return with_sink.softmax(dim=-1, dtype=dtype)[..., :-1].to(scores.dtype)


# ------------------------------------------------------------------------------------------------------------- windowed
# Layers with a window or with chunks store keys and values in arenas of their own, whose slots they free out of reach.

WINDOWED_TYPES: Final = frozenset({"sliding_attention", "chunked_attention"})
"""Types of attention layers that look back over a limited number of positions."""


class WindowedAttention:
    """``near`` answers layers that look back at most ``reach`` positions, ``far`` all others."""

    def __init__(self, far: Attend, near: SlotAttention, reach: int) -> None:
        self._far = far
        self._near = near
        self._reach = reach

    def __call__(self, module: Any, *rows: Any, sliding_window: int | None = None, **options: Any) -> Tensor:
        spans = [span for span in (sliding_window, getattr(module, "chunk", None)) if span is not None]
        attend = self._near if spans and min(spans) <= self._reach else self._far
        return attend(module, *rows, sliding_window=sliding_window, **options)

    def chosen(self, modules: Sequence[Any], sliding_window: int | None) -> Any:
        """See ``attention.chosen``."""
        near = sliding_window is not None and sliding_window <= self._reach
        answering: Any = self._near if near else self._far
        return answering.chosen(modules, sliding_window)


def reach_of(config: Any) -> int | None:
    """Most positions that windows, chunks and unfolded rows reach back; None if all layers attend to everything."""
    spans = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    spans.append(FOLD if RECURRENT_TYPES.intersection(layer_types(config)) else None)
    return max((int(span) for span in spans if span), default=None)


def windowed(config: Any, layers: int) -> list[bool]:
    """Whether the attention of each layer has a window or a chunk."""
    everywhere = [getattr(config, "sliding_window", None) is not None] * layers
    return [kind in WINDOWED_TYPES for kind in layer_types(config)] or everywhere


# -------------------------------------------------------------------------------------------------------------- chunked
# Llama 4's attention over slots: most layers see one chunk of positions; in the others queries grow with position.

CHUNKED: Final = "chunked_attention"


@dataclass(frozen=True)
class Growth:
    """Temperature tuning (arXiv 2501.19399) in Llama 4's layers without rotary embeddings."""

    every: float
    """Positions after which the factor grows again (``floor_scale``)."""
    by: float
    """The factor of the logarithm (``attn_scale``)."""

    def of(self, positions_N: Tensor) -> Tensor:
        """The factor for the queries at each of these positions, [N]."""
        return torch.log1p(torch.floor((positions_N.float() + 1.0) / self.every)) * self.by + 1.0


def follow_positions(config: Any, layers: Sequence[Any], types: Sequence[str]) -> None:
    """Set chunk sizes and growth of queries on the attention modules of chunked models, for ``SlotAttention``.

    transformers' modules would derive chunks from a row's index in the batch instead of its position in the text.
    ``types`` are the attention types of the layers.
    """
    if CHUNKED not in (getattr(config, "layer_types", None) or ()):
        return
    for layer, kind in zip(layers, types, strict=True):
        attention = layer.self_attn
        if kind == CHUNKED:
            attention.chunk = int(config.attention_chunk_size)
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.growth = Growth(float(attention.floor_scale), float(attention.attn_scale))
            # ``SlotAttention`` scales the queries now; transformers' module must not do it once more.
            attention.attn_temperature_tuning = False
