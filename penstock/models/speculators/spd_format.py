"""SPD's speculation modules, and early exits: their configuration, and the tensors that they need.

yuyijiong/speculative_pipeline_decoding writes one ``.pt`` with a state dict and a table, to be converted to safetensors
and config.json (docs/reference/drafters.md). Penstock writes these itself, with the kind in the field ``speculator``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from transformers import LlamaConfig

from penstock.models.checkpoint import Checkpoint
from penstock.models.rope import LENGTH_DEPENDENT, rope_kinds
from penstock.models.speculators.base import (
    Kind,
    SpeculatorCheckpoint,
    check_equal,
    check_shapes,
    refusal,
)
from penstock.models.speculators.eagle_format import bias_shapes, layer_shapes
from penstock.models.speculators.weights import Stored

SPECULATOR: Final = "speculator"
"""The field of config.json that names the kind."""
KINDS: Final[dict[str, Kind]] = {"spd": "spd", "early_exit": "early_exit"}
PAPER, ANCHORS = 10, 11
"""Versions of the repository's format: a projection for every depth, or for a few anchors."""

LAYER_FIELDS: Final = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)
"""Fields that the module's layers share with the target's."""

STORED: Final = (
    (re.compile(r"aggr_projs\.(\d+)\.(.+)"), "projections.{}.{}"),
    (re.compile(r"spec_layers\.(\d+)\.(.+)"), "layers.{}.{}"),
)
"""(pattern of a name in files, the name in the modules here)."""

Tensors = Mapping[str, Stored]
Levels = tuple[tuple[int, ...], ...]


def is_spd(config: Mapping[str, Any], tensors: Tensors) -> bool:
    return SPECULATOR in config or any(name.startswith("spec_layers.") for name in tensors)


def parse_spd(path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> SpeculatorCheckpoint:
    """Parse either variant of SPD's module, or an early exit. Raises FieldError if it does not fit ``target``."""
    stated = config.get(SPECULATOR, "spd")
    if not isinstance(stated, str) or stated not in KINDS:
        raise refusal(path, f"config.json: {SPECULATOR} is {stated!r}; it has to be one of {', '.join(KINDS)}")
    for name, of_target in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        check_equal(path, name, config.get(name), of_target, "the target's")
    version, stages = config.get("version", ANCHORS), None
    if version == PAPER:
        levels, stages = _paper_levels(path, config, target)
    elif version == ANCHORS:
        levels = _anchor_levels(path, config, target)
    else:
        raise refusal(path, f"its version is {version!r}; {PAPER} and {ANCHORS} are supported")
    tensors = {_renamed(name, len(levels) - 1): stored for name, stored in tensors.items()}
    depth = _integer(path, config, "num_spec_layers")
    if depth > len(tensors):
        raise refusal(path, f"num_spec_layers is {depth}, but the file holds {len(tensors)} tensors")
    ids = _draft_ids(path, config, target)
    drafted = target.vocab_size if ids is None else len(ids)
    check_equal(path, "draft_vocab_size", config.get("draft_vocab_size"), drafted, "the tokens that it can draft are")
    layer = _layer(path, tensors, target)
    needed, optional = _shapes(layer, depth, levels, drafted, paper=version == PAPER)
    return SpeculatorCheckpoint(
        KINDS[stated],
        path,
        tuple(sorted({state for level in levels for state in level} - {0})),
        target.hidden_size,
        drafted,
        check_shapes(path, tensors, needed, optional),
        layer,
        layers=depth,
        levels=levels,
        stages=stages,
        asking=1 if config.get("post_state") else 0,
        draft_ids=ids,
    )


def _renamed(name: str, deepest: int) -> str:
    for pattern, ours in STORED:
        if match := pattern.fullmatch(name):
            return ours.format(*match.groups())
    if match := re.fullmatch(r"stage_projs\.(\d+)\.weight", name):
        return f"projections.{deepest - int(match[1])}.weight"
    if match := re.fullmatch(r"fixed_stage_per_layer_projs\.(\d+)\.(\d+)\.weight", name):
        return f"memory.{match[1]}.{deepest - int(match[2]) - 1}.weight"
    return "projections.0.weight" if name == "g0_proj.weight" else name


def _anchor_levels(path: Path, config: Mapping[str, Any], target: Checkpoint) -> Levels:
    """The levels for anchors: level i reads the states at the first i + 1 anchors."""
    anchors, last = config.get("aggr_feature_bound"), target.num_layers
    if (
        not isinstance(anchors, list)
        or not anchors
        or not all(isinstance(state, int) and 0 <= state <= last for state in anchors)
        or any(one >= other for one, other in pairwise(anchors))
    ):
        raise refusal(
            path, f"aggr_feature_bound is {anchors}; it has to be a rising list of the target's states, 0 to {last}"
        )
    if SPECULATOR not in config and anchors[-1] == last:
        # The repository takes this state before the final norm, as no other layout does.
        anchors = [*anchors[:-1], last + 1]
    return tuple(tuple(anchors[: i + 1]) for i in range(len(anchors)))


def _paper_levels(path: Path, config: Mapping[str, Any], target: Checkpoint) -> tuple[Levels, int]:
    """The levels of the paper's variant: level k reads the states listed for g^k. The field begins with g^n."""
    stages, last = _integer(path, config, "num_stages"), target.num_layers
    reads = config.get("shallow_hidden_layer_indices")
    holds = isinstance(reads, list) and len(reads) == stages
    if not holds or not all(
        isinstance(level, list) and level and all(isinstance(state, int) and 0 <= state <= last for state in level)
        for level in reads or ()
    ):
        raise refusal(
            path,
            f"shallow_hidden_layer_indices is {reads}; it has to list the target's states, 0 to {last}, for each of "
            f"its {stages} depths",
        )
    assert isinstance(reads, list)
    return ((0,), *(tuple(level) for level in reversed(reads))), stages


def _integer(path: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise refusal(path, f"{name} is {value!r}; it has to be a whole number above 0")
    return value


def _draft_ids(path: Path, config: Mapping[str, Any], target: Checkpoint) -> tuple[int, ...] | None:
    """The target's ids of the tokens that can be drafted; None for all of them."""
    ids = config.get("draft_token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(isinstance(one, int) and 0 <= one < target.vocab_size for one in ids):
        raise refusal(path, f"draft_token_ids has to be a list of the target's {target.vocab_size} tokens")
    if len(set(ids)) < len(ids):
        raise refusal(path, "draft_token_ids names a token twice")
    return tuple(ids)


def _layer(path: Path, tensors: Tensors, target: Checkpoint) -> Any:
    """The LlamaConfig of the module's layers: the target's, except for the MLP's width, which the file tells."""
    name = "layers.0.mlp.gate_proj.weight"
    if name not in tensors:
        raise refusal(path, "it lacks the tensor spec_layers.0.mlp.gate_proj.weight: download or save it again")
    fields = {field: getattr(target.config, field, None) for field in LAYER_FIELDS}
    taken = {field: value for field, value in fields.items() if value is not None}
    made = LlamaConfig(**taken, intermediate_size=tensors[name].shape[0])
    if kinds := rope_kinds(made) & LENGTH_DEPENDENT:
        raise refusal(path, f"the target's {', '.join(kinds)} rope depends on the longest request: not supported")
    return made


def _shapes(
    layer: Any, depth: int, levels: Levels, drafted: int, *, paper: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The needed and the optional tensors; optional are norms of queries and keys, and biases."""
    width = layer.hidden_size
    needed: dict[str, Any] = {"lm_head.weight": (drafted, width)}
    needed |= {f"projections.{i}.weight": (width, len(level) * width) for i, level in enumerate(levels)}
    optional: dict[str, Any] = {}
    for j in range(depth):
        needed |= layer_shapes(f"layers.{j}", layer, width)
        needed[f"layers.{j}.input_layernorm.weight"] = (width,)
        optional |= bias_shapes(f"layers.{j}", layer)
        optional |= {f"layers.{j}.self_attn.{name}.weight": (layer.head_dim,) for name in ("q_norm", "k_norm")}
        if paper:
            needed |= {f"memory.{j}.{i}.weight": (width, width) for i in range(len(levels) - 1)}
    return needed, optional
