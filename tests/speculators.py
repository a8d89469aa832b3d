"""Tiny random checkpoints of learned drafters in their published layouts, for targets of ``tests/checkpoints.py``.

``eagle(target).save(folder)``. What a layout leaves out or states wrongly in the wild is so here too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.tensors import layer_of

DRAFTED: Final = 60
"""Tokens that a drafter with a vocabulary of its own can draft: every second one of the target's from 7 on."""

FIRST_DRAFTED: Final = 7
HEADS: Final = 4
KEY_HEADS: Final = 2
INNER: Final = 40
BLOCK: Final = 5
"""Rows of a block drafter's block."""
RANK: Final = 6
"""Width of DSpark's Markov head, and of DFlash 2's selector."""
TAPS: Final = 2
"""Rows that a convolution of DFlash 2 adds up."""
GROUP: Final = 8
"""Channels that share a correction in DFlash 2's convolutions."""
COMPARED: Final = 7
"""Tokens of a row that DFlash 2's selector compares."""
MASK: Final = 3
"""The token that stands for those that it has yet to draft."""


@dataclass
class Draft:
    """Configuration and tensors of a drafter; change them at will before ``save``."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    file: str = "model.safetensors"

    def save(self, folder: Path, file: str | None = None) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        file = file or self.file
        if self.config:
            (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / file)
        return folder


class _Drawn:
    """Random matrices, and norms that are not 1, drawn one after another from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def norm(self, width: int) -> Tensor:
        return 1 + self.matrix(width)


def eagle(target: Checkpoint, *, seed: int = 0) -> Draft:
    """EAGLE-1 as SafeAILab's cnets1 stores it: no ``bias`` field but fc.bias, an embedding of its own, no head."""
    drawn, width = _Drawn(seed), target.hidden_size
    tensors = {
        "embed_tokens.weight": drawn.matrix(target.vocab_size, width),
        "fc.weight": drawn.matrix(width, 2 * width),
        "fc.bias": drawn.matrix(width),
        **_layer("layers.0", drawn, width, width),
    }
    return Draft({**_config(target), "architectures": ["LlamaForCausalLM"]}, tensors)


def eagle3(target: Checkpoint, *, seed: int = 0, width: int | None = None) -> Draft:
    """EAGLE-3 as SafeAILab's cnets stores it: no embedding, a head over ``DRAFTED`` tokens.

    With a ``width`` that is not the target's it has an embedding of its own.
    """
    drawn, own = _Drawn(seed), width or target.hidden_size
    tensors = {
        "fc.weight": drawn.matrix(own, 3 * target.hidden_size, scale=0.1),
        **_layer("midlayer", drawn, own, 2 * own),
        "midlayer.hidden_norm.weight": drawn.norm(own),
        "midlayer.input_layernorm.weight": drawn.norm(own),
        "norm.weight": drawn.norm(own),
        "lm_head.weight": drawn.matrix(DRAFTED, own),
        **_vocabulary(target),
    }
    config = {**_config(target), "hidden_size": own, "draft_vocab_size": DRAFTED}
    if own != target.hidden_size:
        config["target_hidden_size"] = target.hidden_size
        tensors["embed_tokens.weight"] = drawn.matrix(target.vocab_size, own)
    return Draft(config, tensors)


def speculators_eagle3(
    target: Checkpoint, *, seed: int = 0, reads: Sequence[int] | None = None, **fields: Any
) -> Draft:
    """The same as vllm-project/speculators stores it; ``fields`` go into the top level of its configuration."""
    plain = eagle3(target, seed=seed)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in plain.tensors.items()}
    layer = {name: value for name, value in plain.config.items() if name != "draft_vocab_size"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFTED,
        **fields,
    }
    if reads is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(reads)
        tensors["fc.weight"] = _Drawn(seed + 1).matrix(target.hidden_size, len(reads) * target.hidden_size, scale=0.1)
    return Draft(config, tensors)


def eagle31(target: Checkpoint, *, seed: int = 0) -> Draft:
    """EAGLE-3.1 as SpecForge and vLLM store it: a norm for each state that it reads, and its output normed."""
    made, drawn = eagle3(target, seed=seed), _Drawn(seed + 1)
    made.tensors |= {f"fc_norm.{i}.weight": drawn.norm(target.hidden_size) for i in range(3)}
    return Draft({**made.config, "fc_norm": True, "norm_output": True}, made.tensors)


def medusa(target: Checkpoint, *, seed: int = 0, heads: int = 3, layers: int = 1) -> Draft:
    """Medusa heads in FasterDecoding's format, stored as medusa_lm_head.safetensors; the stated number is wrong."""
    drawn, width = _Drawn(seed), target.hidden_size
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = drawn.matrix(width, width)
            tensors[f"{head}.{layer}.linear.bias"] = drawn.matrix(width)
        tensors[f"{head}.{layers}.weight"] = drawn.matrix(target.vocab_size, width)
    return Draft({"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "target"}, tensors)


def vllm_medusa(target: Checkpoint, *, seed: int = 0, heads: int = 3, layers: int = 2) -> Draft:
    """vLLM's Medusa: blocks without bias, heads over ``DRAFTED`` tokens, named in token_map."""
    drawn, width = _Drawn(seed), target.hidden_size
    tensors = {"token_map": _target_ids(target)}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = drawn.matrix(width, width)
        tensors[f"lm_heads.{head}.weight"] = drawn.matrix(DRAFTED, width)
    config = {"model_type": "medusa", "num_heads": heads, "num_hidden_layers": layers, "hidden_size": width}
    return Draft({**config, "vocab_size": target.vocab_size, "truncated_vocab_size": DRAFTED}, tensors)


def spd(
    target: Checkpoint,
    *,
    seed: int = 0,
    anchors: Sequence[int] = (0, 2, 4, 7),
    layers: int = 1,
    drafted: bool = True,
    normed: bool = False,
) -> Draft:
    """SPD's module with anchors (version 11), as its repository writes it; 7 is the last but one state of 8 layers."""
    drawn, width = _Drawn(seed), target.hidden_size
    tensors = {f"aggr_projs.{i}.weight": drawn.matrix(width, (i + 1) * width, scale=0.1) for i in range(len(anchors))}
    tensors |= _spec_layers(drawn, width, layers, normed)
    tensors["lm_head.weight"] = drawn.matrix(DRAFTED if drafted else target.vocab_size, width)
    config = {
        **_spd_config(target, layers, drafted),
        "num_stages": 4,
        "num_aggr_types": len(anchors),
        "version": 11,
        "trained_with_use_deepest": False,
        "aggr_feature_bound": list(anchors),
    }
    return Draft(config, tensors)


def spd_paper(target: Checkpoint, *, seed: int = 0, stages: int = 3, layers: int = 1) -> Draft:
    """The paper's module for a number of stages (version 10): its Eq. 1 with the states of an even split."""
    drawn, width = _Drawn(seed), target.hidden_size
    done = [last for _, last in target.even_split(stages)]
    done[-1] -= 1
    reads = [sorted({0, last // 2, last}) for last in reversed(done)]
    tensors = {"g0_proj.weight": drawn.matrix(width, width)}
    for k, row in enumerate(reads):
        tensors[f"stage_projs.{k}.weight"] = drawn.matrix(width, len(row) * width, scale=0.1)
    for j in range(layers):
        for i in range(stages):
            tensors[f"fixed_stage_per_layer_projs.{j}.{i}.weight"] = drawn.matrix(width, width)
    tensors |= _spec_layers(drawn, width, layers, normed=False)
    tensors["lm_head.weight"] = drawn.matrix(target.vocab_size, width)
    config = {
        **_spd_config(target, layers, drafted=False),
        "num_stages": stages,
        "version": 10,
        "trained_with_use_deepest": False,
        "shallow_hidden_layer_indices": reads,
    }
    return Draft(config, tensors)


def early_exit(target: Checkpoint, *, seed: int = 0, layer: int = 2) -> Draft:
    """A head on what a layer gives, in Penstock's own layout."""
    made = spd(target, seed=seed, anchors=(layer,), drafted=False)
    config = {name: value for name, value in made.config.items() if name != "num_stages"}
    return Draft({**config, "speculator": "early_exit"}, made.tensors)


def mtp(target: Checkpoint, *, seed: int = 0) -> Draft:
    """A head apart from its target, as Penstock writes it: in Qwen's layout, with a layer like the target's last."""
    return Draft({"mtp_num_hidden_layers": 1}, _head(target, _Drawn(seed), "mtp.layers.0.", QWEN_HEAD))


def ship_mtp(folder: Path, *, seed: int = 0) -> Path:
    """Put a random head into the checkpoint itself, as Qwen's and DeepSeek's makers do; a second one beside it."""
    target, file = open_checkpoint(str(folder)), folder / "model.safetensors"
    drawn, held = _Drawn(seed), load_file(file)
    last = target.num_layers
    if target.config.model_type.startswith("qwen"):
        held |= _head(target, drawn, "mtp.layers.0.", QWEN_HEAD)
    else:
        names = {"fc": "eh_proj", "embedding": "enorm", "hidden": "hnorm", "norm": "shared_head.norm"}
        behind = {key: f"model.layers.{last}.{name}" for key, name in names.items()}
        held |= _head(target, drawn, f"model.layers.{last}.", behind)
        held[f"model.layers.{last}.shared_head.head.weight"] = held["lm_head.weight"].clone()
        held[f"model.layers.{last}.embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, file, metadata={"format": "pt"})
    return folder


QWEN_HEAD: Final = {
    "fc": "mtp.fc",
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}


def _head(target: Checkpoint, drawn: _Drawn, layer: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Random tensors of a head whose layer is like the target's last one; ``layer`` is what its names begin with."""
    width, last = target.hidden_size, target.num_layers - 1
    tensors = {f"{names['fc']}.weight": drawn.matrix(width, 2 * width)}
    tensors |= {f"{names[norm]}.weight": drawn.norm(width) for norm in ("embedding", "hidden", "norm")}
    with contextlib.ExitStack() as files:
        own = [name for name in target.weights.names() if layer_of(name) == last]
        for name, found in target.weights.slices(own, files).items():
            inner, shape = layer + name.split(f"layers.{last}.")[1], found.get_shape()
            if len(shape) == 3:
                tensors |= _experts(inner, drawn, shape)
            else:
                tensors[inner] = drawn.matrix(*shape) if len(shape) > 1 else drawn.norm(*shape)
    return tensors


def _experts(name: str, drawn: _Drawn, shape: Sequence[int]) -> dict[str, Tensor]:
    """One by one, as their makers store them, where transformers has all in one tensor."""
    layer, _, joint = name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if joint == "gate_up_proj" else [joint]
    rows = shape[1] // len(parts)
    experts = range(shape[0])
    return {f"{layer}.{i}.{part}.weight": drawn.matrix(rows, shape[2]) for i in experts for part in parts}


def dflash(target: Checkpoint, *, seed: int = 0, layers: int = 2, taps: Sequence[int] = (1, 4, 6)) -> Draft:
    """DFlash as z-lab stores it: neither embedding nor head; ``taps`` are layers whose outputs are read."""
    drawn, width = _Drawn(seed), target.hidden_size
    tensors = {
        "fc.weight": drawn.matrix(width, len(taps) * width, scale=0.1),
        "hidden_norm.weight": drawn.norm(width),
        "norm.weight": drawn.norm(width),
    }
    for i in range(layers):
        tensors |= _layer(f"layers.{i}", drawn, width, width)
        tensors[f"layers.{i}.input_layernorm.weight"] = drawn.norm(width)
        tensors |= {f"layers.{i}.self_attn.{name}.weight": drawn.norm(width // HEADS) for name in ("q_norm", "k_norm")}
    config = {
        **_config(target),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "head_dim": width // HEADS,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention"] * layers,
        "block_size": BLOCK,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(taps)},
    }
    return Draft(config, tensors)


def sliding_dflash(target: Checkpoint, *, seed: int = 0) -> Draft:
    """DFlash as SpecForge stores it, its first layer with a window; the size of blocks stands with DFlash's fields."""
    made = dflash(target, seed=seed)
    del made.config["block_size"]
    made.config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    made.config["use_sliding_window"] = True
    made.config["dflash_config"] |= {"block_size": BLOCK, "projector_type": "dflash", "attention_mode": "gqa"}
    return made


def jetspec(target: Checkpoint, *, seed: int = 0) -> Draft:
    """JetSpec's module: DFlash's layout, causal within the block."""
    made = dflash(target, seed=seed)
    made.config["dflash_config"]["causal_head"] = True
    return made


def speculators_dflash(target: Checkpoint, *, seed: int = 0, from_anchor: bool = False) -> Draft:
    """DFlash as vllm-project/speculators stores it: an embedding of its own, and a head over ``DRAFTED`` tokens."""
    made, drawn = dflash(target, seed=seed), _Drawn(seed + 1)
    layer = {name: made.config[name] for name in (*_config(target), "model_type", "head_dim", "rope_theta")}
    made.tensors |= {
        "embed_tokens.weight": drawn.matrix(target.vocab_size, target.hidden_size),
        "lm_head.weight": drawn.matrix(DRAFTED, target.hidden_size),
        **_vocabulary(target),
    }
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.8.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFTED,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 5, 7],
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": False,
    }
    return Draft(config, made.tensors)


def anchored_dflash(target: Checkpoint, *, seed: int = 0) -> Draft:
    """The same, each row of a block saying what follows it."""
    return speculators_dflash(target, seed=seed, from_anchor=True)


def dflash2(target: Checkpoint, *, seed: int = 0, layers: int = 2) -> Draft:
    """DFlash 2 as z-lab and NeMo store it: DFlash with convolutions in each layer, and a selector's codebooks."""
    made = dflash(target, seed=seed, layers=layers)
    made.tensors |= _second(_Drawn(seed + 1), target, layers)
    made.config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    made.config["rope_parameters"] = {"rope_theta": made.config.pop("rope_theta"), "rope_type": "default"}
    made.config["dflash_config"] |= {"block_size": made.config.pop("block_size"), **SECOND}
    return made


def sliding_dflash2(target: Checkpoint, *, seed: int = 0) -> Draft:
    """The same with a window in every layer, as published, in which rows see all of their block none the less."""
    made = dflash2(target, seed=seed)
    made.config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}
    return made


def speculators_dflash2(target: Checkpoint, *, seed: int = 0) -> Draft:
    """DFlash 2 as vllm-project/speculators stores it, with a vocabulary of its own; codebooks are the target's."""
    made = speculators_dflash(target, seed=seed)
    made.tensors |= _second(_Drawn(seed + 2), target, 2)
    made.config |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", **SECOND}
    return made


SECOND: Final = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": COMPARED}


def _second(drawn: _Drawn, target: Checkpoint, layers: int) -> dict[str, Tensor]:
    """The tensors of DFlash 2's convolutions and of its selector."""
    width, tensors = target.hidden_size, {}
    for name in (f"layers.{i}.{conv}" for i in range(layers) for conv in ("attention_conv", "mlp_conv")):
        # Around 1 for the row itself, and less for the row before it, as a trained one begins.
        tensors[f"{name}.base_kernel"] = drawn.matrix(2, TAPS, width) + torch.tensor([[1.0], [0.3]])
        tensors[f"{name}.kernel_projection.weight"] = drawn.matrix(2 * TAPS * width // GROUP, width, scale=0.05)
    return {
        **tensors,
        "candidate_selector.predecessor_codebook": drawn.matrix(target.vocab_size, RANK, scale=0.7),
        "candidate_selector.successor_codebook": drawn.matrix(target.vocab_size, RANK, scale=0.7),
        "candidate_selector.hidden_projection.weight": drawn.matrix(RANK, width),
    }


def dspark(target: Checkpoint, *, seed: int = 0, taps: Sequence[int] = (1, 4, 6)) -> Draft:
    """DSpark as DeepSpec stores it: all fields at the top level, embedding, head and Markov head of its own."""
    made, drawn, width = dflash(target, seed=seed, taps=taps), _Drawn(seed + 1), target.hidden_size
    made.tensors |= {
        "embed_tokens.weight": drawn.matrix(target.vocab_size, width),
        "lm_head.weight": drawn.matrix(target.vocab_size, width),
        **_markov(drawn, target, target.vocab_size),
    }
    made.config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "markov_head_type": "vanilla"}
    made.config |= {"num_anchors": 512, "enable_confidence_head": True, "confidence_head_with_markov": True}
    made.config |= made.config.pop("dflash_config")
    return made


def gated_dspark(target: Checkpoint, *, seed: int = 0) -> Draft:
    """DSpark as SpecForge stores it: the target's embedding and head, and a gate in the Markov head."""
    made, drawn, width = dflash(target, seed=seed), _Drawn(seed + 1), target.hidden_size
    made.tensors |= _markov(drawn, target, target.vocab_size)
    made.tensors["markov_head.gate_proj.weight"] = drawn.matrix(RANK, width + RANK)
    made.tensors["markov_head.gate_proj.bias"] = drawn.matrix(RANK)
    made.config["architectures"] = ["DSparkDraftModel"]
    made.config["dflash_config"] |= {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "gated"}
    return made


def headrace(target: Checkpoint, *, seed: int = 0, taps: Sequence[int] = (1, 4, 6)) -> Draft:
    """Headrace as Penstock stores it: causal, with a Markov head, and a projection of the states of tokens in flight.

    The target's embedding and head are its own.
    """
    made, drawn, width = dflash(target, seed=seed, taps=taps), _Drawn(seed + 1), target.hidden_size
    made.config["dflash_config"]["causal_head"] = True
    made.tensors |= _markov(drawn, target, target.vocab_size)
    made.tensors["partial.weight"] = drawn.matrix(*made.tensors["fc.weight"].shape)
    made.tensors["partial_norm.weight"] = drawn.norm(width) * 0.3
    made.config["architectures"] = ["HeadraceDraftModel"]
    made.config["dflash_config"] |= {"projector_type": "headrace", "markov_rank": RANK, "markov_head_type": "vanilla"}
    return made


def speculators_dspark(target: Checkpoint, *, seed: int = 0) -> Draft:
    """DSpark as vllm-project/speculators stores it, with a vocabulary of its own."""
    made = speculators_dflash(target, seed=seed, from_anchor=True)
    made.tensors |= _markov(_Drawn(seed + 2), target, DRAFTED)
    made.config |= {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}
    made.config |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return made


def peagle(target: Checkpoint, *, seed: int = 0, layers: int = 3) -> Draft:
    """P-EAGLE as vLLM reads it: EAGLE-3's layer and plain ones, an embedding of its own; it states no depths."""
    made, drawn, width = speculators_eagle3(target, seed=seed), _Drawn(seed + 1), target.hidden_size
    made.tensors["embed_tokens.weight"] = drawn.matrix(target.vocab_size, width)
    made.tensors["mask_hidden"] = drawn.matrix(1, 3 * width, scale=1.0)
    for i in range(1, layers):
        made.tensors |= _layer(f"layers.{i}", drawn, width, width)
        made.tensors[f"layers.{i}.input_layernorm.weight"] = drawn.norm(width)
    config = {
        **_config(target),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "attention_bias": False,
        "draft_vocab_size": DRAFTED,
        "parallel_drafting": True,
        "ptd_token_id": MASK,
    }
    return Draft(config, made.tensors)


def speculators_peagle(target: Checkpoint, *, seed: int = 0) -> Draft:
    """P-EAGLE as vllm-project/speculators stores it: its layer's residual is normed, and its states before ``fc``."""
    made, drawn = peagle(target, seed=seed, layers=2), _Drawn(seed + 2)
    made.tensors["mask_hidden"] = made.tensors["mask_hidden"][None]
    made.tensors["input_norm.weight"] = drawn.norm(3 * target.hidden_size)
    config = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_version": "0.8.0",
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK}],
        },
        "transformer_layer_config": {**_config(target), "num_hidden_layers": 2, "model_type": "llama"},
        "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": True,
        "mask_token_id": MASK,
    }
    return Draft(config, made.tensors)


def nemo_peagle(target: Checkpoint, *, seed: int = 0) -> Draft:
    """P-EAGLE as NeMo stores it: one layer with biases, norms of each state, and a prefix before most names."""
    made, drawn, width = peagle(target, seed=seed, layers=1), _Drawn(seed + 2), target.hidden_size
    made.tensors["mask_hidden"] = made.tensors["mask_hidden"][None]
    made.tensors |= {f"fc_norm.{i}.weight": drawn.norm(width) for i in range(3)}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        matrix = made.tensors[f"layers.0.self_attn.{name}.weight"]
        made.tensors[f"layers.0.self_attn.{name}.bias"] = drawn.matrix(len(matrix))
    outside = ("lm_head.weight", "d2t", "t2d", "mask_hidden")
    tensors = {name if name in outside else f"model.{name}": tensor for name, tensor in made.tensors.items()}
    config = {name: value for name, value in made.config.items() if name != "ptd_token_id"}
    config |= {"architectures": ["LlamaEagle3DraftModel"], "mask_token_id": MASK, "num_depths": BLOCK}
    config |= {"fc_norm": True, "norm_output": True, "attention_bias": True, "num_aux_hidden_states": 3}
    config |= {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}
    return Draft(config, tensors)


def _markov(drawn: _Drawn, target: Checkpoint, drafted: int) -> dict[str, Tensor]:
    """The tensors of a Markov and a confidence head."""
    return {
        "markov_head.markov_w1.weight": drawn.matrix(target.vocab_size, RANK, scale=1.0),
        "markov_head.markov_w2.weight": drawn.matrix(drafted, RANK, scale=1.0),
        "confidence_head.proj.weight": drawn.matrix(1, target.hidden_size + RANK),
        "confidence_head.proj.bias": drawn.matrix(1),
    }


def _spd_config(target: Checkpoint, layers: int, drafted: bool) -> dict[str, Any]:
    config = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": DRAFTED if drafted else target.vocab_size,
        "num_spec_layers": layers,
        "base_model_path": "target",
    }
    return {**config, "draft_token_ids": _target_ids(target).tolist()} if drafted else config


def _spec_layers(drawn: _Drawn, width: int, layers: int, normed: bool) -> dict[str, Tensor]:
    tensors = {}
    for j in range(layers):
        tensors |= _layer(f"spec_layers.{j}", drawn, width, width)
        tensors[f"spec_layers.{j}.input_layernorm.weight"] = drawn.norm(width)
        if normed:
            for name in ("q_norm", "k_norm"):
                tensors[f"spec_layers.{j}.self_attn.{name}.weight"] = drawn.norm(width // HEADS)
    return tensors


def _config(target: Checkpoint) -> dict[str, Any]:
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
    }


def _layer(prefix: str, drawn: _Drawn, width: int, entering: int) -> dict[str, Tensor]:
    """A Llama layer's matrices and second norm; ``entering`` wide is what its attention takes in."""
    keys = width // HEADS * KEY_HEADS
    shapes = {
        "self_attn.q_proj": (width, entering),
        "self_attn.k_proj": (keys, entering),
        "self_attn.v_proj": (keys, entering),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (INNER, width),
        "mlp.up_proj": (INNER, width),
        "mlp.down_proj": (width, INNER),
    }
    tensors = {f"{prefix}.{name}.weight": drawn.matrix(*shape) for name, shape in shapes.items()}
    return {**tensors, f"{prefix}.post_attention_layernorm.weight": drawn.norm(width)}


def _target_ids(target: Checkpoint) -> Tensor:
    ids = torch.arange(DRAFTED) * 2 + FIRST_DRAFTED
    assert int(ids[-1]) < target.vocab_size
    return ids


def _vocabulary(target: Checkpoint) -> dict[str, Tensor]:
    ids = _target_ids(target)
    known = torch.zeros(target.vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(DRAFTED), "t2d": known}
