"""Block drafters: a module that drafts a block of tokens in one pass, and its part on the target's stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from penstock.messages import CONTEXT, KEPT, NO_SLOT, PATH, Candidates, Sampling
from penstock.models.attention import Arenas, Attend, SlotAttention
from penstock.models.speculators.base import AttendingReader, DraftVocabulary, Rotation
from penstock.models.speculators.spd import SpecLayer
from penstock.stage.sampler import Context, contexts_of, needs_path, rank_candidates
from penstock.stage.visibility import BatchView, ProtocolError, RequestView

# ---------------------------------------------------------------------------------------------------------------- block
# DFlash's module (z-lab/dflash, dflash/model.py): a few Qwen3 layers over a block of rows, of which the first hold the
# tokens that are known and the others the mask token. JetSpec (arXiv 2606.18394) is the same, causal within the block.
#
# DFlash 2 has convolutions around the layers' parts and a selector behind the head (below, under its name).
#
# Shapes as in base.py: N rows, n rows of which logits are asked, D hidden size, F the width of all states read side
# by side, K key heads, d width of a head, V the target's vocabulary, v the tokens that can be drafted, r the rank of a
# Markov head or of a selector.


@dataclass(frozen=True)
class BlockShape:
    """How a block drafter fills its blocks, and what its layers see.

    A block has ``size`` rows: the known tokens, then ``mask_token``. With ``from_anchor`` a row predicts the token that
    follows it, without it the token of its own position. ``causal`` [layers] says whether a layer's rows see only the
    block's rows before them; ``windows`` [layers] how many positions it looks back over, None for all. ``markov`` is
    the type of the head that adds logits for what follows a row's own token, "" for none, and ``rank`` its width.

    DFlash 2's blocks have a selector, of this ``rank``, which compares the ``compared`` best tokens of a row, and
    convolutions of so many ``taps``, in which ``group`` channels share a correction. 0 stands for none of either.

    With ``partial`` (Headrace) rows of known tokens also read the states that these have in the pipeline by then.
    """

    size: int
    mask_token: int
    from_anchor: bool
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    markov: str = ""
    rank: int = 0
    compared: int = 0
    taps: int = 0
    group: int = 1
    partial: bool = False

    @property
    def chained(self) -> bool:
        """Whether a row drafts nothing before the token before its own answer is known: by a Markov head or a
        selector."""
        return bool(self.markov or self.compared)

    @property
    def ahead(self) -> int:
        """Levels that one pass drafts below the children of a block's first token."""
        return self.reach(1)

    def reach(self, shown: int) -> int:
        """Levels that one pass drafts below the next token's, where its block shows ``shown`` known tokens."""
        return max(0, self.size - shown - 1 + self.from_anchor)


class MarkovHead(nn.Module):
    """DSpark's low-rank matrix from a token to logits of the next one (arXiv 2607.05147; deepseek-ai/DeepSpec).

    With ``gated`` the row's state weighs each of the ``rank`` numbers between token and logits.
    """

    def __init__(self, width: int, rank: int, drafted: int, vocabulary: DraftVocabulary, *, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if gated else None
        self.vocabulary = vocabulary

    def latent(self, hidden_nD: Tensor, tokens_n: Tensor) -> Tensor:
        """The numbers [n, r] between the tokens and the logits of what follows them."""
        latent_nr: Tensor = self.markov_w1(tokens_n)
        if self.gate_proj is not None:
            latent_nr = latent_nr * torch.sigmoid(self.gate_proj(torch.cat([hidden_nD, latent_nr], dim=-1)))
        return latent_nr

    def forward(self, latent_nr: Tensor) -> Tensor:
        """Logits to be added for the tokens that follow, float32 [n, V]; -inf for those it cannot draft."""
        logits_nV: Tensor = self.vocabulary(self.markov_w2(latent_nr))
        return logits_nV


class BlockModule(nn.Module):
    """Layers whose rows attend to each other and to the *context*: the target's states of the tokens before the block.

    The context is made once for a token, of its states, and gives every layer keys and values through the projections
    that the rows use; it is neither normed by the layer nor changed from one layer to the next. ``head`` gives logits
    over the target's vocabulary of states that have been normed. ``features_width`` is F.
    """

    def __init__(
        self,
        config: Any,
        shape: BlockShape,
        features_width: int,
        embed_tokens: nn.Module,
        head: nn.Module,
        *,
        biased: Collection[str],
        markov_head: MarkovHead | None = None,
        candidate_selector: CandidateSelector | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size: int = config.hidden_size
        self.shape = shape
        self.markov_head = markov_head
        self.candidate_selector = candidate_selector
        self.embed_tokens = embed_tokens
        self.fc = nn.Linear(features_width, config.hidden_size, bias=False)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if shape.partial:
            self.partial = nn.Linear(features_width, config.hidden_size, bias=False)
            self.partial_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self._layer(config, i, biased) for i in range(len(shape.causal)))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotation = Rotation(config)
        self.head = head

    def _layer(self, config: Any, index: int, biased: Collection[str]) -> SpecLayer:
        if not self.shape.taps:
            return SpecLayer(config, index, biased, normed=True)
        return ConvolvedLayer(config, index, biased, taps=self.shape.taps, group=self.shape.group)

    def fuse(self, features_NF: Tensor) -> Tensor:
        """The context [N, D] that tokens give with the target's states [N, F]."""
        context_ND: Tensor = self.hidden_norm(self.fc(features_NF))
        return context_ND

    def context(self, context_ND: Tensor, positions_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [K, N, d] of each layer for tokens at these positions, from ``fuse``'s output."""
        rotation = self.rotation(context_ND, positions_N)
        for layer in self.layers:
            own: Any = layer.self_attn
            key_KNd, value_KNd = (
                projection(context_ND).unflatten(-1, (-1, own.head_dim)).transpose(0, 1)
                for projection in (own.k_proj, own.v_proj)
            )
            key_KNd = own.k_norm(key_KNd)
            # Queries and keys turn alike; the function wants both.
            yield apply_rotary_pos_emb(key_KNd, key_KNd, *rotation, unsqueeze_dim=0)[1], value_KNd

    def forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        places_N: Tensor | None = None,
        partial_NF: Tensor | None = None,
    ) -> Tensor:
        """The states [N, D] of the rows of blocks, normed. ``attend`` stores keys and values: see ``Attend``.

        ``places_N`` counts the rows from the beginning of each one's block; only convolutions need it. ``partial_NF``
        are the target's states of each row's token as far as it has got, and zero where there are none, as for masks;
        only a module with ``shape.partial`` reads them.
        """
        hidden_ND: Tensor = self.embed_tokens(tokens_N)
        if self.shape.partial:
            hidden_ND = hidden_ND + self.partial_norm(self.partial(partial_NF))  # zeros stay zeros
        rotation = self.rotation(hidden_ND, positions_N)
        places = (places_N,) if self.shape.taps else ()
        for layer in self.layers:
            hidden_ND = layer(hidden_ND, rotation, attend, *places)
        return self.norm(hidden_ND)

    def entering(self, hidden_nD: Tensor, before_n: Tensor) -> Tensor:
        """The input [n, D + r] of ``logits``: rows of ``forward``'s output, with the latent rows of the Markov head or
        the selector behind.

        A row predicts the token of its own position or, with ``from_anchor``, of the next one. ``before_n`` [n] are the
        tokens one position before the predicted ones. Without such a head the rows are returned alone, [n, D].
        """
        reads_before = self.markov_head or self.candidate_selector
        if reads_before is None:
            return hidden_nD
        return torch.cat([hidden_nD, reads_before.latent(hidden_nD, before_n)], dim=-1)

    def logits(self, entering_nE: Tensor) -> Tensor:
        """The logits, float32 [n, V], from ``entering``'s output; -inf for tokens it cannot draft.

        A selector compares the best of them, and has no say here: see ``selected``.
        """
        hidden_nD, latent_nr = entering_nE.tensor_split([self.hidden_size], dim=-1)
        logits_nV: Tensor = self.head(hidden_nD.contiguous())
        return logits_nV if self.markov_head is None else logits_nV + self.markov_head(latent_nr.contiguous())

    def selected(self, entering_nE: Tensor, logits_nV: Tensor, compared: Sequence[Sequence[int]]) -> Tensor:
        """The logits with what the selector says of the tokens ``compared`` in each row; -inf for all others."""
        assert self.candidate_selector is not None
        selected_nV: Tensor = self.candidate_selector(entering_nE[:, self.hidden_size :], logits_nV, compared)
        return selected_nV


# --------------------------------------------------------------------------------------------------------- block stage
# A block drafter behind the stage core's interface: states to context, and a block of rows for each node asked about.

MOST_SCRATCH: Final = 512
"""Most rows of blocks that are computed at once. Their keys and values lie behind the slots, and are overwritten. They
take memory beside the cache."""


@dataclass(frozen=True)
class Block:
    """The block of one row that is asked about: the slots that it sees as context, and its tokens before the masks."""

    row: int
    context: np.ndarray
    context_positions: np.ndarray
    tokens: np.ndarray
    token_slots: np.ndarray
    """The slots that ``tokens`` are in."""
    before: int
    """Slot of the token before the first; -1 for none."""
    position: int
    """Position of the first token."""
    rows: int
    """Rows of the block, masks included."""


class BlockStage(AttendingReader):
    """A block drafter over slots; implements ``stage.driver.Layers`` and ``Reader``.

    Committed tokens before the root come at level ``CONTEXT`` with the target's states, and their keys and values stay
    in the token's slot. Rows at other levels compute nothing. A node that is asked about is answered by a block of
    its own, over the context before the first token whose states are not known:

        context      | root  a   b   M   M   M         b is asked about, two tokens below the root
        c0 c1 c2 c3  | r0   r1  r2  r3  r4  r5         r3 says what follows b, r4 and r5 what comes further below

    With ``from_anchor`` a row says what follows it, so r2 answers for b. A slot whose context has been lost is hidden.

    With a Markov head or a selector r4 says nothing before the token that follows b is known. The states of such rows
    are stored, and a child of b asks at level ``KEPT``: then its own token joins r4, and no block is computed.
    """

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._capacity = capacity
        # Slots [capacity, capacity + MOST_SCRATCH) are scratch: no node ever has one of them.
        self._arenas = Arenas(capacity + MOST_SCRATCH)
        self._context_of = np.zeros(capacity, dtype=np.int64)
        """The node whose context each slot holds."""
        self._parent_of = np.full(capacity, -1, dtype=np.int64)
        self._below: dict[int, Tensor] = {}
        """States of a block's rows [levels, D] below the first answer, by the slot of the node that was asked about."""

    def forget(self) -> None:
        super().forget()
        self._context_of[:] = 0
        self._parent_of[:] = -1
        self._below.clear()

    @torch.inference_mode()
    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Store the context of the rows that give any. Returns [N, 0]: blocks are computed for what is asked."""
        if view.levels is None or not PATH <= view.levels.min() <= view.levels.max() <= KEPT:
            raise ProtocolError(f"a block drafter's rows have a level of 0 to {KEPT}")
        # What a slot's node drafted ends with the node, or as it becomes context: the tree is then below it.
        over = (self._node_at[view.slots] != view.nodes) | (view.levels == CONTEXT)
        for slot in view.slots[over].tolist():
            self._below.pop(slot, None)
        self.register(view)
        self._parent_of[view.slots] = view.parents
        rows = np.flatnonzero(view.levels == CONTEXT)
        # A slot that holds a new node has no context any more; one that is asked about again keeps what it has.
        rows = rows[self.store.has(view.slots[rows], view.nodes[rows])]
        if len(rows):
            self._context_of[view.slots[rows]] = view.nodes[rows]
            self._add_context(view, rows)
        return torch.empty(len(view), 0)

    def _add_context(self, view: BatchView, rows: np.ndarray) -> None:
        """Store the keys and values that these rows of a batch give as context; their own states are known."""
        slots, positions_N = view.slots[rows], torch.from_numpy(view.positions[rows]).to(self.device)
        slots_N = torch.from_numpy(slots).to(self.device)
        context_ND = self.module.fuse(self.store.states(slots)).to(self.dtype)
        for layer, (key_KNd, value_KNd) in enumerate(self.module.context(context_ND, positions_N)):
            self._arenas.store(layer, slots_N, key_KNd.to(self.dtype), value_KNd.to(self.dtype))

    def _is_context(self, slots: np.ndarray) -> np.ndarray:
        """Whether each slot holds context, bool [S], of the node that is there now: slots are reused."""
        made_of = self._context_of[slots]
        held: np.ndarray = (made_of == self._node_at[slots]) & (made_of > 0)  # node 0 stands for none
        return held

    @torch.inference_mode()
    def candidates(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """``count`` noise-ranked candidates after each row in ``wanted``, and for up to ``view.ahead`` levels below.

        Penalties and grammars depend on the tokens in between, so that requests with any get no further levels.
        """
        assert view.levels is not None
        kept = [i for i, row in enumerate(wanted) if view.levels[row] == KEPT]
        answers = self._from_kept(view, [wanted[i] for i in kept], [samplings[i] for i in kept], count)
        samplings = [sampling for i, sampling in enumerate(samplings) if i not in kept]
        blocks = [self._block(view, row) for row in wanted if view.levels[row] != KEPT]
        first = 0
        while first < len(blocks):
            # At least one block, and as many more as find room.
            ends = np.cumsum([block.rows for block in blocks[first:]])
            more = max(1, int(np.searchsorted(ends, MOST_SCRATCH, side="right")))
            part = slice(first, first + more)
            answers += self._answers(view, blocks[part], samplings[part], count)
            first += more
        return answers

    def _from_kept(
        self, view: BatchView, rows: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """Candidates after rows from the nearest block above each; a row that no block reaches gets none."""
        states = [self._kept_for(int(view.slots[row])) for row in rows]
        found = [i for i, state in enumerate(states) if state is not None]
        if not found:
            return []
        rows, samplings = [rows[i] for i in found], [samplings[i] for i in found]
        hidden_nD = torch.stack([state for state in states if state is not None])
        before_n = torch.from_numpy(view.tokens[rows]).to(self.device)
        entering_nE = self.module.entering(hidden_nD, before_n)
        positions, nodes = view.positions[rows] + 1, view.nodes[rows]
        contexts = contexts_of(view, rows, samplings, self.grammars)
        return self._ranked(entering_nE, samplings, positions.tolist(), nodes.tolist(), count, contexts)

    def _ranked(
        self,
        entering_nE: Tensor,
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        nodes: Sequence[int],
        count: int,
        contexts: Sequence[Context],
    ) -> list[Candidates]:
        """``rank_candidates`` of the module's logits, or of what its selector makes of the best of them."""
        logits_nV, compared = self.module.logits(entering_nE), self.module.shape.compared
        if compared:
            # The target picks by its logits and the noise of the position, so that the noise also counts here: the best
            # tokens of the logits alone would leave out what the noise lifts.
            best = rank_candidates(logits_nV, samplings, positions, nodes, compared, contexts)
            logits_nV = self.module.selected(entering_nE, logits_nV, [one.tokens for one in best])
        return rank_candidates(logits_nV, samplings, positions, nodes, count, contexts)

    def _kept_for(self, slot: int) -> Tensor | None:
        """The state [D] by which the nearest block above a slot predicts what follows its token, if there is one."""
        above, distance = int(self._parent_of[slot]), 0
        while above >= 0 and above not in self._below:
            above, distance = int(self._parent_of[above]), distance + 1
        below = self._below.get(above)
        return below[distance] if below is not None and distance < len(below) else None

    def _block(self, view: BatchView, row: int) -> Block:
        """The block for a row, of what it sees."""
        seen = next(one for one in view.views if one.request == view.requests[row])
        sees = seen.mask[np.searchsorted(seen.rows, row)]
        order = np.argsort(seen.positions[sees], kind="stable")
        slots, positions = seen.slots[sees][order], seen.positions[sees][order]
        held = self._is_context(slots)
        held[-1] = False  # an asked row stands in its block, however much is known of it
        last = np.flatnonzero(held)
        begin = int(last[-1]) + 1 if len(last) else 0
        assert view.slot_tokens is not None, "only a stage's own view knows what its slots hold"
        tokens, shape = view.slot_tokens[slots[begin:]], self.module.shape
        rows = min(max(shape.size, len(tokens) + (not shape.from_anchor)), MOST_SCRATCH)
        # Of a path longer than any block only the end is shown.
        tokens = tokens[-(rows - (not shape.from_anchor)) :]
        position, above = int(positions[-1]) + 1 - len(tokens), slots[: -len(tokens)]
        before = int(above[-1]) if len(above) else NO_SLOT
        context, places = slots[:begin][held[:begin]], positions[:begin][held[:begin]]
        return Block(row, context, places, tokens, slots[-len(tokens) :], before, position, rows)

    def _answers(
        self, view: BatchView, blocks: Sequence[Block], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """Compute blocks together, and rank candidates after their tokens and, unless these are chained, levels
        below."""
        shape = self.module.shape
        batch = self._batch(blocks)
        hidden_ND = self._states(blocks, batch)
        picked, rows, levels, of_rows, last = [], [], [], [], []
        start = 0
        for block, sampling in zip(blocks, samplings, strict=True):
            # The first answer is the row of the last known token (``from_anchor``), or the first mask behind it.
            first = len(block.tokens) - shape.from_anchor
            left = block.rows - first
            further = 0 if needs_path(sampling) or shape.chained else view.ahead
            for level in range(min(left, 1 + further)):
                picked.append(start + first + level)
                rows.append(block.row)
                levels.append(level)
                of_rows.append(sampling)
                last.append(int(block.tokens[-1]))
            # Rows behind the first answer wait for their tokens before; a clone, or the whole batch would stay alive.
            if shape.chained:
                self._below[int(view.slots[block.row])] = hidden_ND[start + first + 1 : start + block.rows].clone()
            start += block.rows
        # The token before is known for a block's first answer alone, and a head that reads it is asked for no other.
        index_n, before_n = (torch.tensor(one, device=self.device) for one in (picked, last))
        entering_nE = self.module.entering(hidden_ND[index_n], before_n)
        positions, nodes = view.positions[rows] + 1 + np.array(levels), view.nodes[rows]
        contexts = contexts_of(view, rows, of_rows, self.grammars)
        ranked = self._ranked(entering_nE, of_rows, positions.tolist(), nodes.tolist(), count, contexts)
        return [msgspec.structs.replace(one, level=level) for one, level in zip(ranked, levels, strict=True)]

    def _states(self, blocks: Sequence[Block], batch: BatchView) -> Tensor:
        """The states [N, D] of the rows of these blocks, which ``batch`` holds, normed."""
        hidden_ND: Tensor = self.module(
            torch.from_numpy(batch.tokens).to(self.device),
            torch.from_numpy(batch.positions).to(self.device),
            BlockAttention(self.module.shape, batch, self.attention),
            torch.from_numpy(np.concatenate([np.arange(block.rows) for block in blocks])).to(self.device),
            self._partial(blocks) if self.module.shape.partial else None,
        )
        return hidden_ND

    def _partial(self, blocks: Sequence[Block]) -> Tensor:
        """The states [N, F] that have come of each row's token, and zeros for others and for masks.

        A row does not wait for states: after the next result the strategy asks again, and by then more have come.
        """
        firsts = np.cumsum([0, *(block.rows for block in blocks)])
        rows = np.concatenate(
            [first + np.arange(len(block.tokens)) for first, block in zip(firsts[:-1], blocks, strict=True)]
        )
        slots = np.concatenate([block.token_slots for block in blocks])
        partial_NF = torch.zeros(int(firsts[-1]), self.store.width, dtype=self.dtype, device=self.device)
        partial_NF[torch.from_numpy(rows)] = self.store.partial(slots, self.nodes_in(slots))
        return partial_NF

    def _batch(self, blocks: Sequence[Block]) -> BatchView:
        """The blocks' rows in scratch slots, each seeing its context and all of its block."""
        mask, views, tokens, positions = self.module.shape.mask_token, [], [], []
        start = 0
        for number, block in enumerate(blocks):
            own = np.arange(start, start + block.rows)
            places = block.position + np.arange(block.rows)
            views.append(
                RequestView(
                    number,
                    own,
                    np.concatenate([block.context, self._capacity + own]),
                    np.concatenate([block.context_positions, places]),
                    np.ones((block.rows, len(block.context) + block.rows), dtype=bool),
                    len(block.context),
                )
            )
            tokens += [block.tokens, np.full(block.rows - len(block.tokens), mask, dtype=np.int64)]
            positions.append(places)
            start += block.rows
        every = np.arange(start)
        return BatchView(
            requests=np.repeat(np.arange(len(blocks)), [block.rows for block in blocks]),
            nodes=every,
            slots=self._capacity + every,
            positions=np.concatenate(positions),
            tokens=np.concatenate(tokens),
            views=views,
            parents=np.full(start, -1, dtype=np.int64),
        )


class BlockAttention:
    """Answers the attention calls of a batch of blocks: each layer causal within the block or not, with its window."""

    def __init__(self, shape: BlockShape, view: BatchView, attention: Callable[[BatchView], SlotAttention]) -> None:
        """``attention`` makes the attention over what a batch's rows see."""
        self._shape = shape
        self._view = view
        self._attention = attention

    def __call__(self, module: Any, *arguments: Any, **options: Any) -> Tensor:
        layer = module.layer_idx
        attend = self._causal if self._shape.causal[layer] else self._whole
        return attend(module, *arguments, sliding_window=self._shape.windows[layer], **options)

    @cached_property
    def _whole(self) -> SlotAttention:
        # Rows were given their context and all of their block: that is the mask already.
        return self._attention(self._view)

    @cached_property
    def _causal(self) -> SlotAttention:
        views = [
            replace(one, mask=one.mask & (one.positions[None, :] <= self._view.positions[one.rows, None]))
            for one in self._view.views
        ]
        return self._attention(replace(self._view, views=views))


# ------------------------------------------------------------------------------------------------------------- dflash 2
# What inco.ai's DFlash 2 adds to DFlash, as NVIDIA-NeMo/Automodel and llama.cpp compute it. T is the number of
# taps of a convolution, of which tap 0 is the row itself, tap 1 the row before it, and so on.


class DynamicConvolution(nn.Module):
    """A convolution over a block's rows before a sublayer, and another one after it.

    Each kernel is a learned base and a correction that is computed from the sublayer's input in the same row, for both
    convolutions at once. ``group`` neighbouring channels share a correction.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        self._group = group

    def forward(self, entering_ND: Tensor, places_N: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The output [N, D] of ``sublayer`` between the two convolutions; ``places_N``: see ``convolved``."""
        corrections = self.kernel_projection(entering_ND).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before_NTD, after_NTD = (self.base_kernel + corrections.repeat_interleave(self._group, dim=-1)).unbind(dim=1)
        return convolved(sublayer(convolved(entering_ND, before_NTD, places_N)), after_NTD, places_N)


def convolved(rows_ND: Tensor, kernel_NTD: Tensor, places_N: Tensor) -> Tensor:
    """Each row and those before it in its block, channel by channel weighed by the row's own kernel, [N, D].

    ``places_N`` counts rows from the beginning of each one's block. What would lie before the block counts as zero:

        tap 1   |  0  r0  r1  r2  |  0  s0  s1
        tap 0   | r0  r1  r2  r3  | s0  s1  s2
    """
    total_ND = kernel_NTD[:, 0] * rows_ND
    for tap in range(1, kernel_NTD.shape[1]):
        # Filled rather than multiplied by zero: another block's row may hold anything.
        earlier_ND = rows_ND.roll(tap, dims=0).masked_fill((places_N < tap)[:, None], 0.0)
        total_ND = total_ND + kernel_NTD[:, tap] * earlier_ND
    return total_ND


class ConvolvedLayer(SpecLayer):
    """Qwen3's layer with convolutions around its attention and around its MLP, inside of the residuals."""

    def __init__(self, config: Any, index: int, biased: Collection[str], *, taps: int, group: int) -> None:
        super().__init__(config, index, biased, normed=True)
        self.attention_conv = DynamicConvolution(config.hidden_size, taps, group)
        self.mlp_conv = DynamicConvolution(config.hidden_size, taps, group)

    def forward(  # type: ignore[override]
        self, hidden_ND: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, places_N: Tensor
    ) -> Tensor:
        normed_ND = self.input_layernorm(hidden_ND)
        hidden_ND = hidden_ND + self.attention_conv(
            normed_ND, places_N, lambda rows_ND: self.self_attn(rows_ND, rotation, attend)
        )
        return hidden_ND + self.mlp_conv(self.post_attention_layernorm(hidden_ND), places_N, self.mlp)


class CandidateSelector(nn.Module):
    """Scores a row's few best tokens by the token before: S(a, b) = U(b) + <A[a] * (H h), B[b]>.

    U are the row's logits and h its state; A and B are the codebooks [V, r], and H is the projection [r, D].
    """

    def __init__(self, width: int, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def latent(self, hidden_nD: Tensor, tokens_n: Tensor) -> Tensor:
        """The numbers [n, r] by which the candidates after these tokens are compared: A[a] * (H h)."""
        latent_nr: Tensor = self.predecessor_codebook[tokens_n] * self.hidden_projection(hidden_nD)
        return latent_nr

    def forward(self, latent_nr: Tensor, logits_nV: Tensor, compared: Sequence[Sequence[int]]) -> Tensor:
        """The logits with the scores of the tokens ``compared`` of each row; -inf for others, float32 [n, V].

        A row for which no token is compared stays as it is.
        """
        compares_n = torch.tensor([len(tokens) > 0 for tokens in compared], device=logits_nV.device)
        scores_nV = logits_nV.masked_fill(compares_n[:, None], -torch.inf)
        rows = [row for row, tokens in enumerate(compared) for _ in tokens]
        ids = [token for tokens in compared for token in tokens]
        rows_m, ids_m = torch.tensor([rows, ids], dtype=torch.int64, device=logits_nV.device)
        pairs_m = (latent_nr[rows_m].float() * self.successor_codebook[ids_m].float()).sum(dim=-1)
        scores_nV[rows_m, ids_m] = logits_nV[rows_m, ids_m] + pairs_m
        return scores_nV
