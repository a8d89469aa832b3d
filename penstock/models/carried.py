"""Layers whose slots or rows hold something else: latents of keys and values (DeepSeek), parallel states (Gemma 3n)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from penstock.checkpoint.architectures import EMBEDDED, HIDDEN, per_layer_width, pieces_before, streams
from penstock.models.attention import Kernel, Scoring, Segment, SlotAttention
from penstock.models.fused import agree, sample_of, widened

# --------------------------------------------------------------------------------------------------------------- latent
# Multi-head latent attention with its compressed cache (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#
# A slot stores the latent of which the keys and values of all heads are made, r numbers, and s more that hold the
# position and that all heads share. With U the layer's matrix from latents to a head's keys, W that to its values, and
# c a latent,
#
#     q . (U c)  =  (U^T q) . c          sum of p_i (W c_i)  =  W (sum of p_i c_i)
#
# so each query is projected to the latents once (on the left: H heads' keys for every slot), and the attention's output
# back once. Shapes: N rows, S slots, H heads, n and s the widths of a query without and with the position, e that of
# values.

MOST_EXPANDED: Final = 1 << 24
"""Most numbers of keys and values that are made of latents at once: 2^24, 64 MiB in float32."""
ALL: Final = slice(None)


class Latent(nn.Module):
    """The matrices of one layer, in place of its ``kv_b_proj``."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.rank = int(attention.kv_lora_rank)
        self.width = int(attention.qk_nope_head_dim)
        weight_HXr = attention.kv_b_proj.weight.detach().view(attention.num_heads, -1, self.rank)
        # Buffers: they are neither a linear layer that would be packed, nor parameters that should have been.
        self.register_buffer("keys_Hnr", weight_HXr[:, : self.width], persistent=False)
        self.register_buffer("values_Her", weight_HXr[:, self.width :], persistent=False)
        own = weight_HXr.shape[1]
        self.cheaper_expanded = self.rank * own / (2 * self.rank - own) if 2 * self.rank > own else math.inf
        """Rows from which on expanding latents to keys and values takes fewer products than projecting the queries.

        Expanding takes r products for each of a head's n + e numbers in every slot, and n + e for each row and slot;
        projecting takes 2 r for each row and slot, and nothing for a slot alone.
        """

    def attend(
        self, kernel: Kernel, query_Hnx: Tensor, latents_1Sy: Tensor, segment: Segment, scoring: Scoring
    ) -> Tensor:
        """The output of ``kernel`` over the keys and values of the latents [1, S, r + s]; [H, rows, e]."""
        if query_Hnx.shape[1] >= self.cheaper_expanded:
            return self._attend_expanded(kernel, query_Hnx, latents_1Sy, segment, scoring)
        own, turned = query_Hnx.split([self.width, query_Hnx.shape[2] - self.width], dim=-1)
        query_Hny = torch.cat([own @ self.keys_Hnr, turned], dim=-1)
        # All heads share the latents as keys, and their first r numbers as values.
        found_Hnr = kernel(query_Hny, latents_1Sy, latents_1Sy[..., : self.rank], segment, scoring)
        return found_Hnr @ self.values_Her.transpose(1, 2)

    def _attend_expanded(
        self, kernel: Kernel, query_Hnx: Tensor, latents_1Sy: Tensor, segment: Segment, scoring: Scoring
    ) -> Tensor:
        """Attend with expanded keys and values, some heads at a time: all may take more memory than the cache."""
        each = latents_1Sy.shape[1] * (query_Hnx.shape[2] + self.values_Her.shape[1])
        step = max(1, MOST_EXPANDED // each)
        parts = [slice(head, head + step) for head in range(0, len(query_Hnx), step)]
        found = [kernel(query_Hnx[part], *self.expanded(latents_1Sy, part), segment, scoring) for part in parts]
        return torch.cat(found)

    def expanded(self, latents_1Sy: Tensor, heads: slice = ALL) -> tuple[Tensor, Tensor]:
        """Keys [heads, S, n + s] and values [heads, S, e] of latents [1, S, r + s]."""
        latents, turned = latents_1Sy[..., : self.rank], latents_1Sy[..., self.rank :]
        keys_HSn = latents @ self.keys_Hnr[heads].transpose(1, 2)
        keys = torch.cat([keys_HSn, turned.expand(len(keys_HSn), -1, -1)], dim=-1)
        return keys, latents @ self.values_Her[heads].transpose(1, 2)


class LatentAttention:
    """Answers attention calls over latents; ``latents`` maps a layer's number to its matrices.

    Layers without latents are answered by ``attention`` itself.
    """

    def __init__(self, attention: SlotAttention, latents: dict[int, Latent]) -> None:
        self._attention = attention
        self._latents = latents

    def __call__(
        self, module: Any, query_HNx: Tensor, latents_1Ny: Tensor, nothing: Tensor, attention_mask: Any, **options: Any
    ) -> Tensor:
        latent, kernel = self._latents.get(module.layer_idx), self._attention.kernel
        if latent is None:
            return self._attention(module, query_HNx, latents_1Ny, nothing, attention_mask, **options)

        # The arenas store latents as keys, [1, capacity, r + s], and values of width 0.
        def over_latents(query: Tensor, kept: Tensor, _: Tensor, segment: Segment, scoring: Scoring) -> Tensor:
            return latent.attend(kernel, query, kept, segment, scoring)

        attention = SlotAttention(self._attention.arenas, self._attention.plan, over_latents)
        return attention(module, query_HNx, latents_1Ny, nothing, attention_mask, **options)


def keep_latents(layers: Sequence[Any]) -> dict[int, Latent]:
    """Let the layers with latent attention store only latents, in place. Returns their matrices by layer number.

    Layers that use a latent in another way stay as they are.
    """
    found = {}
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        by_latents = type(getattr(attention, "kv_b_proj", None)) is nn.Linear and hasattr(attention, "expand_kv")
        if by_latents and makes_the_same(attention):
            latent = Latent(attention)
            attention.latent, attention.kv_b_proj = latent, nn.Identity()
            attention.expand_kv = unexpanded
            found[int(attention.layer_idx)] = latent
    return found


def unexpanded(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces transformers' ``expand_kv``: returns a row's latent [1, 1, N, r + s], and values of no width."""
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope[..., :0]


@torch.no_grad()
def makes_the_same(attention: Any) -> bool:
    """Whether transformers' module makes the same keys and values of some sample latents as ``Latent``."""
    if attention.kv_b_proj.bias is not None:
        return False
    wide: Any = widened(attention)
    latents = sample_of(wide.kv_b_proj.weight)
    turned = latents[..., :1].expand(-1, -1, int(wide.qk_rope_head_dim))
    expected = wide.expand_kv(latents[None], turned[None])
    found = Latent(wide).expanded(torch.cat([latents, turned], dim=-1))
    return all(agree(one, other[0]) for one, other in zip(found, expected, strict=True))


# ---------------------------------------------------------------------------------------------------------------- altup
# Gemma 3n's parallel hidden states of a row: made from its embedding, and merged behind the last layer.
#
# Source: transformers' Gemma3nTextModel; alternating updates, arXiv 2301.13310.

LEAST_SQUARE: Final = 1e-5
"""Mean square that a state is taken to have at least, so that nothing is divided by 0. transformers' Gemma3nTextModel
has the same."""


def spread(base: Any, embedded_1ND: Tensor) -> Tensor:
    """[1, N, D] -> [streams, 1, N, D]: the embedding, and its projections scaled to the same length."""
    length = root_mean_square(embedded_1ND)
    return torch.stack([embedded_1ND, *(as_long(one(embedded_1ND), length) for one in base.altup_projections)])


def gather(base: Any, hidden_S1ND: Tensor) -> Tensor:
    """[streams, 1, N, D] -> [1, N, D]: the mean of the first stream and of the others' projections, as long as it."""
    length = root_mean_square(hidden_S1ND[0])
    others = zip(base.altup_unembed_projections, hidden_S1ND[1:], strict=True)
    return torch.stack([hidden_S1ND[0], *(as_long(one(hidden), length) for one, hidden in others)]).mean(dim=0)


def root_mean_square(hidden: Tensor) -> Tensor:
    """[.., D] -> [.., 1]"""
    return (hidden**2).mean(dim=-1, keepdim=True) ** 0.5


def as_long(hidden: Tensor, length: Tensor) -> Tensor:
    """``hidden`` [.., D], scaled to the root mean square ``length`` [.., 1]."""
    own = (hidden**2).mean(dim=-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return hidden * length / own


# ----------------------------------------------------------------------------------------------------------------- base
# A stage's layers for models whose rows carry more than hidden states; the layers are transformers' own.


class SharedStates(dict[str, tuple[Tensor, Tensor]]):
    """Kind of layer -> keys and values [1, K, N, d] of the batch's rows.

    Releases of transformers differ in the key: it is the kind, or the number of the layer that makes them.
    """

    def __init__(self, types: Sequence[str]) -> None:
        super().__init__()
        self._types = types

    def __getitem__(self, key: str | int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(self._kind(key))

    def __setitem__(self, key: str | int, states: tuple[Tensor, Tensor]) -> None:
        super().__setitem__(self._kind(key), states)

    def _kind(self, key: str | int) -> str:
        return self._types[key] if isinstance(key, int) else key


class CarryingBase(nn.Module):
    """Layers [first, last) of the ``base`` model of ``config``; ``StageModel`` has taken the norm out of it before.

    A layer that reads another's keys and values gets those of the batch, as in transformers: the layer that makes them
    is on this stage, or the rows have carried them here.
    """

    def __init__(self, base: Any, config: Any, first: int, last: int) -> None:
        super().__init__()
        self.base = base
        self.layers = base.layers
        self._own = list(range(first, last))
        self._types = config.layer_types
        self._entering = pieces_before(config, first)
        self._leaving = None if last == config.num_hidden_layers else pieces_before(config, last)
        self._streams = streams(config)
        self._per_layer = per_layer_width(config) > 0 and first < last
        self._table = int(getattr(config, "vocab_size_per_layer_input", config.vocab_size))
        # Some releases of transformers insist on the rows by which they would look up tokens that are not given.
        asked = inspect.signature(base.get_per_layer_inputs).parameters if self._per_layer else {}
        self._looks_up_by_embedding = "inputs_embeds" in asked

    def forward(self, tokens_1N: Tensor, positions_1N: Tensor, carried_NX: Tensor | None) -> Tensor:
        """The rows' hidden states and all that they carry behind these layers, [N, Y]; after the last layer [N, D].

        ``carried_NX`` is what they carried before these layers; None on the first stage, which embeds the tokens.
        """
        hidden, embedded, shared = self._begin(tokens_1N) if carried_NX is None else self._unpack(carried_NX)
        per_layer = self._per_layer_inputs(tokens_1N, embedded) if self._per_layer else None
        turned: dict[str, Any] = {}
        for place, index in enumerate(self._own):
            kind = self._types[index]
            if kind not in turned:
                turned[kind] = self.base.rotary_emb(hidden, positions_1N, kind)
            hidden = self.layers[index](
                hidden,
                position_embeddings=turned[kind],
                per_layer_input=None if per_layer is None else per_layer[:, :, place],
                shared_kv_states=shared,
                attention_mask=None,
                position_ids=positions_1N,
            )
        return self._pack(hidden, embedded, shared)

    def _begin(self, tokens_1N: Tensor) -> tuple[Tensor, Tensor, SharedStates]:
        embedded = self.base.embed_tokens(tokens_1N)
        hidden = spread(self.base, embedded) if self._streams > 1 else embedded
        return hidden, embedded, SharedStates(self._types)

    def _per_layer_inputs(self, tokens_1N: Tensor, embedded: Tensor) -> Tensor:
        """The per-layer embeddings of the stage's own layers, [1, N, own layers, width]."""
        beside = {"inputs_embeds": embedded} if self._looks_up_by_embedding else {}
        # Tokens beyond the table, which stand for images, have its first row; before 5.23 transformers fails for them.
        in_table_1N = torch.where(tokens_1N < self._table, tokens_1N, 0)
        per_layer = self.base.get_per_layer_inputs(in_table_1N, **beside)
        found: Tensor = self.base.project_per_layer_inputs(embedded, per_layer)
        return found

    def _unpack(self, carried_NX: Tensor) -> tuple[Tensor, Tensor, SharedStates]:
        """The rows' tensors: hidden states, embeddings of their tokens, and other layers' keys and values."""
        sizes = [torch.Size(shape).numel() for shape in self._entering.values()]
        # The pieces lie side by side in the order of ``pieces_before``, which the sending stage packs by, too.
        parts = zip(self._entering.items(), carried_NX.split(sizes, dim=-1), strict=True)
        found = {name: part.unflatten(-1, shape) for (name, shape), part in parts}
        hidden = found.pop(HIDDEN).transpose(0, 1)
        embedded = found.pop(EMBEDDED, carried_NX)[None]
        # [N, 2, K, d] -> keys and values [1, K, N, d] each.
        shared = SharedStates(self._types)
        for kind, both in found.items():
            shared[kind] = both.permute(1, 2, 0, 3)[:1], both.permute(1, 2, 0, 3)[1:]
        return hidden[:, None] if self._streams > 1 else hidden, embedded, shared

    def _pack(self, hidden: Tensor, embedded: Tensor, shared: SharedStates) -> Tensor:
        """The elements that the rows take along, [N, Y], in the order in which the next stage unpacks it."""
        if self._leaving is None:
            return gather(self.base, hidden)[0] if self._streams > 1 else hidden[0]
        rows = embedded.shape[1]
        pieces = {HIDDEN: hidden.reshape(self._streams, rows, -1).transpose(0, 1), EMBEDDED: embedded[0]}
        for kind, (keys, values) in shared.items():
            pieces[kind] = torch.stack([keys[0], values[0]]).permute(2, 0, 1, 3)
        return torch.cat([pieces[name].reshape(rows, -1) for name in self._leaving], dim=-1)


# ------------------------------------------------------------------------------------------------------------- sparsity
# Gemma 3n's sparse feed-forwards with a constant that transformers computes anew in every call, waiting for the GPU.


class Cutoff(nn.Module):
    """Sets all but the largest numbers of each row to 0, and takes the threshold off those.

    A share ``sparsity`` of normally distributed numbers lies below the threshold, which is the row's mean plus a
    multiple of its standard deviation.

    It gives the same bits as ``_gaussian_topk``. That makes the multiplier on the device of the rows, and torch's
    distributions then read it to see whether it is valid.
    """

    def __init__(self, sparsity: float) -> None:
        super().__init__()
        multiplier = Normal(0.0, 1.0).icdf(torch.tensor(sparsity, dtype=torch.float32))
        self.register_buffer("multiplier", multiplier, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[.., I] -> [.., I]"""
        multiplier: Any = self.multiplier
        mean, spread = inputs.mean(dim=-1, keepdim=True), inputs.std(dim=-1, keepdim=True, unbiased=False)
        return nn.functional.relu(inputs - (mean + spread * multiplier.type(inputs.dtype)))


@torch.no_grad()
def keep_cutoffs(layers: Sequence[Any]) -> None:
    """Give sparse feed-forwards their ``Cutoff``, in place, where a sample shows no difference."""
    for layer in layers:
        feed: Any = getattr(layer, "mlp", None)
        sparsity = getattr(feed, "activation_sparsity", 0.0)
        if not sparsity or not hasattr(feed, "_gaussian_topk"):
            continue
        cutoff, sample = Cutoff(sparsity), sample_of(feed.down_proj.weight)
        if torch.equal(cutoff(sample), feed._gaussian_topk(sample)):
            feed.cutoff = cutoff  # a part of the layer, so that it moves with it
            vars(feed)["_gaussian_topk"] = cutoff  # found before the method of its class
