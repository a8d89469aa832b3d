"""Block drafters of ``tests/speculators.py`` in GGUF, as llama.cpp's own converter writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from penstock.checkpoint.checkpoint import Checkpoint
from tests.gguf_files import add, finish
from tests.speculators import Draft

NAMES: Final = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
PARTS: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}


@dataclass
class GgufDraft:
    """A file's entries and tensors; change them at will before ``save``."""

    entries: dict[str, Any]
    tensors: dict[str, np.ndarray]
    architecture: str = "dflash"

    def save(self, path: Path, kind: Kind = Kind.F32) -> Path:
        """Write the file, with matrices of whole blocks as ``kind``."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.entries.items():
            add(writer, key, value)
        for name, data in self.tensors.items():
            fits = data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and data.dtype == np.float32
            stored = gguf.quants.quantize(data, kind) if fits and kind != Kind.F32 else data
            writer.add_tensor(name, stored, raw_dtype=kind if fits else None)
        finish(writer)
        return path


def of_draft(draft: Draft, target: Checkpoint) -> GgufDraft:
    """The same module in llama.cpp's layout."""
    config = {**draft.config, **draft.config.get("dflash_config", {})}
    layers = config.get("transformer_layer_config", config)
    rope = layers.get("rope_parameters", layers)
    states = config.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in config["target_layer_ids"]]
    head = layers["head_dim"]
    about: dict[str, Any] = {
        "block_count": layers["num_hidden_layers"],
        "context_length": 2048,
        "embedding_length": layers["hidden_size"],
        "feed_forward_length": layers["intermediate_size"],
        "attention.head_count": layers["num_attention_heads"],
        "attention.head_count_kv": layers["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": layers["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head,
        "block_size": config["block_size"],
        "target_layers": states,
        "sample_from_anchor": config.get("sample_from_anchor", "markov_rank" in config),
    }
    about |= {name: config[name] for name in config if name.startswith(("conv_", "selector_"))}
    if kinds := layers.get("layer_types"):
        about["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
        about["attention.sliding_window"] = layers.get("sliding_window") or 0
    if config.get("is_causal") or config.get("causal_head"):
        about["attention.causal"] = True
    entries = {"general.type": "model", **{f"dflash.{name}": value for name, value in about.items()}}
    entries["tokenizer.ggml.tokens"] = [f"token{i}" for i in range(target.vocab_size)]
    entries["tokenizer.ggml.mask_token_id"] = config["mask_token_id"]
    return GgufDraft(entries, dict(_tensors(draft)))


def _tensors(draft: Draft) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in draft.tensors.items():
        data = tensor.numpy()
        if name == "d2t":  # differences there, the tokens' ids themselves here
            found[name] = data + np.arange(len(data))
        elif name in NAMES:
            found[NAMES[name]] = data
        elif name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            end = ".weight" if part.endswith(".weight") else ".bias" if part.endswith(".bias") else ""
            found[f"blk.{layer}.{PARTS[part.removesuffix(end)]}{end}"] = data
    return found
