"""Opens a learned drafter's checkpoint, and loads its module and its parts on the target's stages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.look import GGUF, block_kind, resolve
from penstock.checkpoint.tensors import Tensors, check_finite
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import check_folder, read_json, torch_dtype
from penstock.models.loader import load_module
from penstock.models.quantized.pack import pack
from penstock.models.speculators.base import (
    MAPS,
    BlockShape,
    DraftVocabulary,
    Kind,
    SpeculatorCheckpoint,
    find_tensors,
    refusal,
)
from penstock.models.speculators.block import BlockModule, BlockStage, MarkovHead
from penstock.models.speculators.block_format import INNER_FIELDS, parse_block
from penstock.models.speculators.eagle import Eagle, Eagle3, EagleStage, parse_eagle, parse_eagle3
from penstock.models.speculators.medusa import Medusa, MedusaStage, is_medusa, parse_medusa
from penstock.models.speculators.mtp import LAYER, Mtp, is_mtp, load_base, no_head, parse_mtp
from penstock.models.speculators.reader import FeatureReader
from penstock.models.speculators.spd import Spd, SpdStage, is_spd, parse_spd
from penstock.models.stage_model import NormOnly, grammars_of

# -------------------------------------------------------------------------------------------------------------- formats
# Opens a learned drafter's checkpoint: recognises its layout by the files, and checks it against its target.
#
# Only headers and configuration are read. The layouts: SafeAILab/EAGLE's for EAGLE-1 (cnets1) and EAGLE-3 (cnets),
# vllm-project/speculators' for eagle3 and dflash, z-lab/dflash's, SpecForge's and JetSpec's for blocks,
# FasterDecoding/Medusa's, vLLM's for Medusa, yuyijiong/speculative_pipeline_decoding's for SPD, and MTP heads in a
# target's own checkpoint.

log = logging.getLogger(__name__)

__all__ = ["SpeculatorCheckpoint", "open_speculator"]

PARSERS: Final = {
    "eagle": parse_eagle,
    "eagle3": parse_eagle3,
    "medusa": parse_medusa,
    "mtp": parse_mtp,
    "spd": parse_spd,
    "block": parse_block,
}
OWN_NOTES: Final = ("_", "trained_with_")
"""Beginnings of fields in which libraries and Penstock's own training leave notes."""
READ: Final = frozenset(
    {
        *("architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version", "bias", "version"),
        *("rope_theta", "rope_scaling", "base_model_name_or_path", "base_model_path", "medusa_num_heads"),
        *(
            "num_heads",
            "num_layers",
            "medusa_num_layers",
            "truncated_vocab_size",
            "draft_vocab_size",
            "target_hidden_size",
            "eagle_config",
        ),
        *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        *("transformer_layer_config", "speculators_model_type", "speculators_version", "speculators_config"),
        *("speculator", "num_stages", "num_spec_layers", "num_aggr_types", "aggr_feature_bound", "draft_token_ids"),
        *("shallow_hidden_layer_indices", "post_state", "embed_requires_grad", "has_no_defaults_at_init"),
        *("dflash_config", "num_target_layers", "layer_types", "sliding_window", "use_sliding_window", "is_causal"),
        *("aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal", "max_window_layers"),
        *("num_anchors", *INNER_FIELDS),
    }
)
"""Fields of drafters' configurations, beside a layer's, that are read or do not concern the computation."""
TYPE_FIELD: Final = "speculators_model_type"


def open_speculator(path: str, target: Checkpoint) -> SpeculatorCheckpoint:
    """Read everything but the weights of the speculator ``path`` (folder, file or hub id), for drafting for ``target``.

    Raises FieldError naming the tensor or field that is missing, unknown, not supported or made for another model.
    """
    with _named(path):
        place = Path(path).expanduser()
        place = place if place.is_file() else resolve(path)
        if place.suffix == GGUF:
            raise refusal(place, "learned drafters are read from safetensors, small models in GGUF by draft_model")
        check_folder(place.parent if place.is_file() else place)
        tensors = find_tensors(place)
        config = read_json((place.parent if place.is_file() else place) / "config.json")
    kind = _kind(place, config, tensors, target)
    if kind != "mtp":  # an MTP head's configuration is the target's
        name_unknown(place, config)
    return PARSERS[kind](place, config, tensors, target)


def name_unknown(path: Path, config: Mapping[str, Any]) -> None:
    """Warn of fields in a drafter's configuration that are not read: drafts may be worse without them, tokens never."""
    known = LlamaConfig().to_dict().keys() | READ
    if unknown := sorted(name for name in config if name not in known and not name.startswith(OWN_NOTES)):
        log.warning("%s: config.json holds %s, which is not known here and not followed", path, ", ".join(unknown))


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Turn errors about the files into ones about the field that names them."""
    try:
        yield
    except FieldError:
        raise
    except ConfigError as error:
        raise refusal(Path(path), str(error).removeprefix("model: ")) from error


def _kind(path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> str:
    """The name of the parser. A configuration that names a kind counts before any tensor's name."""
    if block_kind(config) is not None and path != target.path:
        return "block"
    if is_mtp(tensors, target):
        return "mtp"
    if path == target.path:
        raise no_head(target)
    stated = config.get(TYPE_FIELD)
    if stated is not None:
        if stated != "eagle3":
            raise refusal(
                path, f"config.json: {TYPE_FIELD} is {stated!r}; 'eagle3', 'dflash' and 'dspark' are supported"
            )
        return "eagle3"
    if any(name.startswith("midlayer.") for name in tensors) or "layers.0.hidden_norm.weight" in tensors:
        return "eagle3"
    if is_medusa(tensors):
        return "medusa"
    if is_spd(config, tensors):
        return "spd"
    if "fc.weight" in tensors:
        return "eagle"
    some = ", ".join(sorted(tensors)[:3])
    raise refusal(
        path,
        f"it is no EAGLE, EAGLE-3, Medusa, MTP, SPD or DFlash checkpoint; its tensors are {some}, ...; "
        "a small model of its own drafts with method 'draft_model'",
    )


# --------------------------------------------------------------------------------------------------------------- loader
# Builds a learned drafter's module from its checkpoint. Embedding and head are the target's if it has none.


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


Module = BlockModule | Eagle | Eagle3 | Medusa | Mtp | Spd


def load_speculator(checkpoint: SpeculatorCheckpoint, target: Checkpoint, dtype: str, device: str) -> Module:
    """The module of ``checkpoint``, with weights in ``dtype`` on ``device``, without gradients.

    Raises ConfigError for an unknown dtype, or ids of tokens that the target does not have.
    """
    torch_format = torch_dtype(dtype)
    stored = {name: one.read() for name, one in checkpoint.tensors.items() if not name.startswith(LAYER)}
    vocabulary = DraftVocabulary(_target_ids(checkpoint, target, stored), target.vocab_size)
    weights = {name: tensor.to(torch_format) for name, tensor in stored.items() if name not in MAPS}
    check_finite(str(checkpoint.path), weights.items())
    if checkpoint.kind == "medusa":
        module: Module = _medusa(checkpoint, weights, vocabulary)
    else:
        embedding = _embedding(weights, target, dtype, device)
        head = _head(weights, vocabulary, target, dtype, device)
        if checkpoint.block is not None:
            module = _block(checkpoint, checkpoint.block, weights, embedding, head, vocabulary)
        elif checkpoint.kind == "mtp":
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
            normed_states=checkpoint.normed_states,
            norm_output=checkpoint.norm_output,
        )


def _block(
    checkpoint: SpeculatorCheckpoint,
    shape: BlockShape,
    weights: Mapping[str, Tensor],
    embedding: nn.Module,
    head: nn.Module,
    vocabulary: DraftVocabulary,
) -> BlockModule:
    layer, width = checkpoint.layer, weights["fc.weight"].shape[1]
    biased = {name.split(".")[-2] for name in weights if ".self_attn." in name and name.endswith("_proj.bias")}
    markov = None
    with torch.device("meta"):
        if shape.markov:
            drafted, gated = checkpoint.draft_vocab_size, shape.markov == "gated"
            markov = MarkovHead(layer.hidden_size, shape.rank, drafted, vocabulary, gated=gated)
        return BlockModule(layer, shape, width, embedding, head, biased=biased, markov_head=markov)


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
    stored = {name: one.read() for name, one in checkpoint.tensors.items() if name in MAPS or len(one.shape) == 1}
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


# ---------------------------------------------------------------------------------------------------------------- stage
# Loads a learned drafter as the stage of a pipeline of its own.

STAGES: Final[dict[Kind, type[FeatureReader]]] = {
    "dflash": BlockStage,
    "dspark": BlockStage,
    "eagle": EagleStage,
    "eagle3": EagleStage,
    "early_exit": SpdStage,
    "jetspec": BlockStage,
    "medusa": MedusaStage,
    "mtp": EagleStage,
    "spd": SpdStage,
}


def load_speculator_stage(
    path: str, target: str, *, capacity: int, dtype: str, device: str, quantization: str = "none"
) -> FeatureReader:
    """The learned drafter in folder (or hub id) ``path`` for the model in ``target``, with ``capacity`` slots.

    ``quantization`` is "none" or a format of ``quantization.pack``. Raises ConfigError if the two do not belong
    together.
    """
    model = open_checkpoint(target)
    checkpoint = open_speculator(path, model)
    module = load_speculator(checkpoint, model, dtype, device)
    pack(module, quantization)
    stage = STAGES[checkpoint.kind](module, checkpoint.reads, model.hidden_size, capacity, dtype, device)
    stage.grammars = grammars_of(model)
    return stage
