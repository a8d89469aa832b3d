"""Block drafters in llama.cpp's GGUF layout: its entries and tensors as a configuration that the other layouts have.

One architecture, ``dflash``, stands for DFlash, DFlash 2 and DSpark. Entries of convolutions and of a selector tell
DFlash 2, the tensors of a Markov head DSpark. Source: llama.cpp, src/models/dflash.cpp and conversion/qwen.py.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.gguf import gguf_tensor
from penstock.checkpoint.gguf_blocks import READABLE, mapped
from penstock.checkpoint.gguf_config import add_rope, contradiction, number
from penstock.checkpoint.gguf_header import (
    BLOCK_DRAFTER,
    FORKED,
    OTHERS,
    REQUANTISE,
    Header,
    TensorInfo,
    numbers,
    read_header,
)
from penstock.checkpoint.gguf_header import refusal as file_refusal
from penstock.checkpoint.tensors import StoredTensor
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import problem_in, shown
from penstock.models.speculators.base import FIELD, MAPS, refusal
from penstock.models.speculators.block_format import DEFAULT_BLOCK, FULL, LAYERS, SECOND, SLIDING, BlockCheckpoint
from penstock.models.speculators.eagle import DEFAULT_THETA

log = logging.getLogger(__name__)

MASK: Final = "tokenizer.ggml.mask_token_id"
"""The entry that names the token of rows that are yet to be drafted."""
TAPS: Final = "aux_hidden_state_layer_ids"
"""The field of a configuration that lists the hidden states that are read."""
APART: Final = ("attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern", "rope.freq_base")
"""Entries about the layers that are no single whole numbers."""
OF_LAYERS: Final = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
"""Entries about the layers, without the architecture in front -> the fields of a configuration that they become."""
OF_BLOCKS: Final = {
    "block_size": "block_size",
    # Both count hidden states, of which the embedding is the first: the output of layer k is k + 1.
    "target_layers": TAPS,
    "sample_from_anchor": "sample_from_anchor",
    "attention.causal": "is_causal",
    "final_logit_softcapping": "final_logit_softcapping",
    **{name: name for name in SECOND},
}
"""Entries about the blocks -> the fields of a configuration that they become."""
NEUTRAL: Final = {"logit_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0)}
"""Entries that would change the computation -> the values with which they are followed."""
SILENT: Final = frozenset({"attention.value_length", "rope.dimension_count", "rope.dimension_sections", "vocab_size"})
"""Further entries that are checked, or change nothing."""

WHOLE: Final = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "token_map": "d2t",
    "d2t": "d2t",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
"""The module's tensors -> GGUF's."""
IN_LAYERS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
"""The parts of the module's layers that end in ``.weight`` or ``.bias`` -> GGUF's."""
BARE: Final = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
"""The parts of the module's layers without such an end -> GGUF's."""
OURS: Final = {theirs: ours for ours, theirs in [*WHOLE.items(), *IN_LAYERS.items(), *BARE.items()] if ours != "d2t"}
"""GGUF's names, within a layer or outside of layers -> the module's."""
THEIRS: Final = {
    **WHOLE,
    "mask_token_id": MASK,
    "markov_rank": "markov_w1.weight",
    **{ours: f"{BLOCK_DRAFTER}.{theirs}" for theirs, ours in [*OF_LAYERS.items(), *OF_BLOCKS.items()]},
}
"""The module's tensors outside of layers and the configuration's fields -> GGUF's names."""
LAYER: Final = re.compile(r"(blk|layers)\.(0|[1-9][0-9]{0,8})\.(.+?)(\.weight|\.bias)?")
"""A name of a tensor in a layer, GGUF's or the module's."""
WORD: Final = re.compile(r"[\w.]*\w")
"""A name in a message."""
INTEGERS: Final = {GGMLQuantizationType.I32: torch.int32, GGMLQuantizationType.I64: torch.int64}
"""Formats of token ids -> torch's."""


def parse_gguf(path: Path, target: Checkpoint) -> BlockCheckpoint:
    """The block drafter in a GGUF file. Raises FieldError, under the file's own names."""
    try:
        header = read_header(path)
        _check_architecture(header)
        _name_unknown(header)
        config, tensors = _config(header), _tensors(header)
    except ConfigError as error:
        # The file is named in front of the problem already.
        problem = str(error).removeprefix("model: ").removeprefix(f"{path}: ")
        raise refusal(path, problem.replace(f"{path} is", "it is", 1)) from error
    tokens = header.count("tokenizer.ggml.tokens")
    if tokens > target.vocab_size:
        raise refusal(
            path,
            f"its vocabulary has {tokens} tokens, the target's {target.vocab_size}: it was trained for another model",
        )
    try:
        return BlockCheckpoint.parse(path, config, tensors, target)
    except FieldError as error:
        # Fields and tensors were checked under the names that other layouts have for them.
        intro = f"{FIELD} is {str(path)!r}: "
        problem = str(error).removeprefix(intro).removeprefix("config.json: ").replace("config.json", "its header")
        if not problem.startswith("it holds the tensor"):  # which is under its own name already
            problem = WORD.sub(lambda word: _theirs(word[0]), problem)
        raise refusal(path, problem) from error


def _check_architecture(header: Header) -> None:
    """Raise ConfigError unless the file holds a block drafter as llama.cpp itself writes them."""
    architecture = header.architecture
    if architecture == BLOCK_DRAFTER:
        return
    if architecture in FORKED:
        raise file_refusal(header, OTHERS[architecture])
    raise problem_in(
        header.path,
        "general.architecture",
        f"is {shown(architecture)}; of learned drafters only block drafters are read from GGUF "
        f"({BLOCK_DRAFTER}), others from safetensors; small models draft by method 'draft_model'",
    )


def _name_unknown(header: Header) -> None:
    """Warn of entries about the drafter that are not read: drafts may be worse without them, tokens never."""
    known = {*OF_LAYERS, *OF_BLOCKS, *NEUTRAL, *SILENT}
    own = [key.removeprefix(f"{BLOCK_DRAFTER}.") for key in header.entries if key.startswith(f"{BLOCK_DRAFTER}.")]
    unknown = sorted(name for name in own if name not in known and not name.startswith("rope.scaling."))
    if unknown:
        log.warning("%s holds %s, which is not known here and not followed", header.path, ", ".join(unknown))


def _config(header: Header) -> dict[str, Any]:
    """The entries as a configuration like vllm-project/speculators', whose lists of states count as GGUF's do."""
    for name, values in NEUTRAL.items():
        stated = number(header, name, float)
        if stated is not None and stated not in values:
            raise contradiction(header, name, f"is {stated}, which is not supported")
    sizes = {ours: number(header, name) for name, ours in OF_LAYERS.items() if name not in APART}
    layers = {**sizes, "layer_types": _kinds(header, sizes), **_norm(header), **_rope(header, sizes)}
    blocks = {name: number(header, name) for name in ("block_size", *SECOND)}
    markov = next((one for one in ("markov_w1.weight", "markov_w2.weight") if one in header.tensors), None)
    selects = any(value is not None for name, value in blocks.items() if name in SECOND)
    selects |= any(name.startswith("selector_") for name in header.tensors)
    if markov is None and blocks["block_size"] is None:
        blocks["block_size"] = DEFAULT_BLOCK
    head = {"projector_type": "dspark", "markov_head_type": "vanilla"} if markov else {}
    return {
        "architectures": ["DFlash2DraftModel"] if selects else ["DFlashDraftModel"],
        LAYERS: {"model_type": BLOCK_DRAFTER, "hidden_act": "silu", **layers},
        **{name: value for name, value in blocks.items() if value is not None},
        **head,
        "markov_rank": header.tensors[markov].shape[-1] if markov else None,
        "draft_vocab_size": header.tensors["d2t"].shape[0] if "d2t" in header.tensors else None,
        "sample_from_anchor": number(header, "sample_from_anchor", bool),
        # llama.cpp's rows see all of their block, also in layers with a window, unless the file says otherwise.
        "is_causal": bool(number(header, "attention.causal", bool)),
        "final_logit_softcapping": number(header, "final_logit_softcapping", float) or None,
        "mask_token_id": header.value(MASK),
        TAPS: _listed(header, "target_layers"),
    }


def _norm(header: Header) -> dict[str, float]:
    """The norms' epsilon, which every file of llama.cpp's states."""
    name = "attention.layer_norm_rms_epsilon"
    eps = number(header, name, float)
    if eps is None or not 0 <= eps < 1:
        raise contradiction(header, name, f"is {eps}; it has to be a number of 0 or more, below 1")
    return {"rms_norm_eps": eps}


def _rope(header: Header, sizes: dict[str, Any]) -> dict[str, Any]:
    """The rotary fields, and a check of the entries that have to agree with the heads' width."""
    heads, width = sizes["num_attention_heads"], sizes["head_dim"]
    if width is None and heads and sizes["hidden_size"]:
        width = sizes["hidden_size"] // heads
    values = number(header, "attention.value_length")
    if values not in (None, width):
        raise contradiction(header, "attention.value_length", f"is {values}; it has to be the keys' {width}")
    # Sections are for targets with several kinds of positions, of which text has one.
    pairs, sections = (width or 0) // 2, _listed(header, "rope.dimension_sections")
    if sections and (sections[0] != pairs or any(sections[1:])):
        raise contradiction(header, "rope.dimension_sections", f"is {sections}; only [{pairs}, 0, 0, 0] is supported")
    table: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": DEFAULT_THETA}}
    table["max_position_embeddings"] = sizes["max_position_embeddings"] or 0
    add_rope(header, table, width or 0)
    return {"rope_parameters": table["rope_parameters"]}


def _kinds(header: Header, sizes: dict[str, Any]) -> list[str] | None:
    """Each layer's kind, where the file states a window."""
    name, depth = "attention.sliding_window_pattern", sizes["num_hidden_layers"]
    if not sizes["sliding_window"]:
        return None
    slides = _listed(header, name)
    if slides is None or len(slides) != depth:
        raise contradiction(header, name, f"is {slides}; it has to say of {depth} layers whether each has the window")
    return [SLIDING if one else FULL for one in slides]


def _listed(header: Header, name: str) -> list[int] | None:
    """The whole numbers of an entry's list; None where there is no such entry."""
    found = numbers(header, f"{header.architecture}.{name}")
    if found is not None and not (np.issubdtype(found.dtype, np.integer) or found.dtype == bool):
        raise contradiction(header, name, "is a list of numbers with fractions; it has to be one of whole numbers")
    return None if found is None else [int(one) for one in found]


# -------------------------------------------------------------------------------------------------------------- tensors
# The tensors under the module's names, and all names back again for messages.


def _tensors(header: Header) -> dict[str, StoredTensor]:
    """The tensors under the module's names."""
    return {_ours(info.name): _stored(info) for info in header.tensors.values()}


def _stored(info: TensorInfo) -> StoredTensor:
    """A tensor of the file. Raises ConfigError for a format that cannot be read."""
    if _ours(info.name) in MAPS:
        if info.kind not in INTEGERS:
            raise problem_in(info.file, info.name, f"is stored as {info.kind.name}; token ids have to be I64 or I32")
        kind = INTEGERS[info.kind]
        return StoredTensor(
            info.file,
            info.name,
            info.shape,
            info.kind.name,
            lambda index: mapped(info).view(kind).reshape(info.shape).clone()[index],
        )
    if info.kind not in READABLE:
        raise problem_in(info.file, info.name, f"is stored as {info.kind.name}, which cannot be read: {REQUANTISE}")
    # The rows of queries and keys are in transformers' order, as in all files of Qwen3.
    stored = gguf_tensor(info, lambda rows, name: rows)
    if info.name == "conf_proj.weight" and len(info.shape) == 1:
        # llama-quantize drops a last dimension of 1, which is torch's first.
        return replace(stored, shape=(1, *info.shape), select=lambda index: stored.read()[None][index])
    return stored


def _ours(name: str) -> str:
    """The module's name of a tensor, or one that no module has."""
    if name in OURS:
        return OURS[name]
    layer = LAYER.fullmatch(name)
    if layer is None or layer[1] != "blk" or layer[3] not in OURS:
        return f"unknown {name}"  # by its own name it might be taken for another one of the module's
    return f"layers.{layer[2]}.{OURS[layer[3]]}{layer[4] or ''}"


def _theirs(name: str) -> str:
    """GGUF's name of a tensor or of a field; other words stay as they are."""
    if name in THEIRS:
        return THEIRS[name]
    layer = LAYER.fullmatch(name)
    if layer is None or layer[1] != "layers" or layer[3] not in {**IN_LAYERS, **BARE}:
        return name
    part = {**IN_LAYERS, **BARE}[layer[3]]
    return f"blk.{layer[2]}.{part}{layer[4] or ''}"
