"""Builds a learned drafter's module from its checkpoint. Embedding and head are the target's if it has none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.dtypes import torch_dtype
from penstock.models.checkpoint import Checkpoint
from penstock.models.loader import check_finite, load_module
from penstock.models.speculators.base import MAPS, SpeculatorCheckpoint, refusal
from penstock.models.speculators.eagle import Eagle, Eagle3
from penstock.models.speculators.layer import DraftVocabulary
from penstock.models.speculators.medusa import Medusa
from penstock.models.speculators.mtp import LAYER, Mtp, load_base
from penstock.models.speculators.spd import Spd
from penstock.models.speculators.weights import read_tensors
from penstock.models.stage_model import NormOnly


class TargetHead(nn.Module):
    """The target's own head, with its soft cap or scale, over states that have been normed already."""

    def __init__(self, target: Checkpoint, dtype: str, device: str) -> None:
        super().__init__()
        causal = load_module(target, target.num_layers, target.num_layers, dtype, device)
        setattr(causal, target.parts.base, NormOnly(nn.Identity(), getattr(causal, target.parts.base)))
        self._causal = causal

    def forward(self, hidden_nD: Tensor) -> Tensor:
        """The logits, float32 [n, V]."""
        return self._causal(inputs_embeds=hidden_nD[None], use_cache=False).logits[0].float()


Module = Eagle | Eagle3 | Medusa | Mtp | Spd


def load_speculator(checkpoint: SpeculatorCheckpoint, target: Checkpoint, dtype: str, device: str) -> Module:
    """The module of ``checkpoint``, with weights in ``dtype`` on ``device``, without gradients.

    Raises ConfigError for an unknown dtype, or ids of tokens that the target does not have.
    """
    torch_format = torch_dtype(dtype)
    stored = read_tensors({name: one for name, one in checkpoint.tensors.items() if not name.startswith(LAYER)})
    vocabulary = DraftVocabulary(_target_ids(checkpoint, target, stored), target.vocab_size)
    weights = {name: tensor.to(torch_format) for name, tensor in stored.items() if name not in MAPS}
    check_finite(str(checkpoint.path), weights.items())
    if checkpoint.kind == "medusa":
        module: Module = _medusa(checkpoint, weights, vocabulary)
    else:
        embedding = _embedding(weights, target, dtype, device)
        head = _head(weights, vocabulary, target, dtype, device)
        if checkpoint.kind == "mtp":
            module = _mtp(checkpoint, target, dtype, device, embedding, head)
        elif checkpoint.levels:
            module = _spd(checkpoint, weights, embedding, final_norm(target, dtype, device), head)
        else:
            module = _eagle(checkpoint, weights, embedding, head)
    # Shapes and names were checked when the checkpoint was opened. What the file lacks has come from the target.
    module.load_state_dict(weights, strict=False, assign=True)
    module.to(device).requires_grad_(False)
    return module


def _eagle(
    checkpoint: SpeculatorCheckpoint, weights: Mapping[str, Tensor], embedding: nn.Module, head: nn.Module
) -> Eagle | Eagle3:
    layer = checkpoint.layer
    biased = {name.split(".")[-2] for name in weights if name.endswith("_proj.bias")}
    with torch.device("meta"):
        if checkpoint.kind == "eagle":
            return Eagle(layer, embedding, head, fc_bias="fc.bias" in weights, biased=biased)
        return Eagle3(
            layer,
            weights["fc.weight"].shape[1],
            embedding,
            head,
            biased=biased,
            norm_before_residual=checkpoint.norm_before_residual,
            norm_before_fc=checkpoint.norm_before_fc,
        )


def _spd(
    checkpoint: SpeculatorCheckpoint,
    weights: Mapping[str, Tensor],
    embedding: nn.Module,
    norm: nn.Module,
    head: nn.Module,
) -> Spd:
    with torch.device("meta"):
        return Spd(
            checkpoint.layer,
            checkpoint.layers,
            checkpoint.levels,
            embedding,
            norm,
            head,
            biased={name.split(".")[-2] for name in weights if name.endswith("_proj.bias")},
            normed="layers.0.self_attn.q_norm.weight" in weights,
            memory=checkpoint.stages is not None,
            asking=checkpoint.asking,
        )


def _mtp(
    checkpoint: SpeculatorCheckpoint, target: Checkpoint, dtype: str, device: str, embedding: nn.Module, head: nn.Module
) -> Mtp:
    place = checkpoint.place
    own = {name.removeprefix(LAYER): one for name, one in checkpoint.tensors.items() if name.startswith(LAYER)}
    base = load_base(target, place, own, dtype, device)
    layer = getattr(base, target.parts.layers)[place]
    return Mtp(base, layer, final_norm(target, dtype, device), embedding, head)


def final_norm(target: Checkpoint, dtype: str, device: str) -> nn.Module:
    """The target's final norm, frozen."""
    last = target.num_layers
    base = getattr(load_module(target, last, last, dtype, device), target.parts.base)
    norm: nn.Module = getattr(base, target.parts.norm)
    return norm.requires_grad_(False)


def _medusa(checkpoint: SpeculatorCheckpoint, weights: Mapping[str, Tensor], vocabulary: DraftVocabulary) -> Medusa:
    bias = "blocks.0.layers.0.bias" in weights
    heads, layers, width = checkpoint.heads, checkpoint.layers, checkpoint.hidden_size
    with torch.device("meta"):
        return Medusa(heads, layers, width, checkpoint.draft_vocab_size, vocabulary, bias=bias)


def _embedding(weights: Mapping[str, Tensor], target: Checkpoint, dtype: str, device: str) -> nn.Module:
    """The drafter's own embedding, or the target's as stored, without a scale that the target applies."""
    weight = weights.get("embed_tokens.weight")
    if weight is None:
        base = getattr(load_module(target, 0, 0, dtype, device), target.parts.base)
        weight = getattr(base, target.parts.embed).weight.detach()
    return nn.Embedding.from_pretrained(weight)


def _head(
    weights: Mapping[str, Tensor], vocabulary: DraftVocabulary, target: Checkpoint, dtype: str, device: str
) -> nn.Module:
    if "lm_head.weight" not in weights:
        return TargetHead(target, dtype, device)
    weight = weights["lm_head.weight"]
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(linear, vocabulary)


def check_draft_ids(checkpoint: SpeculatorCheckpoint, target: Checkpoint) -> None:
    """Raise FieldError if a drafter's map names tokens that its target does not have, or its vectors hold NaN."""
    small = {name: one for name, one in checkpoint.tensors.items() if name in MAPS or len(one.shape) == 1}
    stored = read_tensors(small)
    _target_ids(checkpoint, target, stored)
    check_finite(str(checkpoint.path), stored.items())


def _target_ids(checkpoint: SpeculatorCheckpoint, target: Checkpoint, stored: Mapping[str, Tensor]) -> Tensor | None:
    """The target's id of each token that can be drafted, [v]; None if these are all of the target's, in order."""
    if checkpoint.draft_ids is not None:
        return torch.tensor(checkpoint.draft_ids)
    if "token_map" in stored:
        name, ids_v = "token_map", stored["token_map"].long()
    elif "d2t" in stored:
        name, ids_v = "d2t", stored["d2t"].long() + torch.arange(len(stored["d2t"]))
    else:
        return None
    strange = ids_v[(ids_v < 0) | (ids_v >= target.vocab_size)]
    if len(strange):
        raise refusal(checkpoint.path, f"{name} leads to token {int(strange[0])}; the target has {target.vocab_size}")
    if len(ids_v.unique()) < len(ids_v):
        raise refusal(checkpoint.path, f"{name} leads to one token of the target from two drafted ones")
    return ids_v
