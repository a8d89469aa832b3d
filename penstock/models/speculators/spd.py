"""SPD: the speculation module, its checkpoint format, and the stage that answers with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.tensors import Tensors
from penstock.models.attention import Attend
from penstock.models.probe import LENGTH_DEPENDENT, rope_kinds
from penstock.models.speculators.base import (
    AttendingReader,
    DecoderLayer,
    Kind,
    Material,
    Rotation,
    SpeculatorCheckpoint,
    check_equal,
    check_rotation,
    check_shapes,
    refusal,
)
from penstock.models.speculators.eagle import bias_shapes, layer_shapes
from penstock.stage.visibility import BatchView, ProtocolError

# ------------------------------------------------------------------------------------------------------------------ spd
# SPD's speculation module: a small transformer over features from whatever depth each token has reached.
#
# Two variants, both from Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), sections 3.3 to 3.5, as
# yuyijiong/speculative_pipeline_decoding stores them. The paper's (its version 10) has a projection for each of the n +
# 1 depths; rows of tokens under way are memory: they give keys and values to every layer, through a projection of their
# own in each, and are not updated. In the later one (11) a few anchors stand for all depths, so that one module serves
# every number of stages, and all rows go through all layers. A head on the first stage's output (early exit) is the
# second variant with one anchor.
#
# Shapes as in base.py; F is the width of all states that are read, side by side.


class SpecLayer(DecoderLayer):
    """A Llama layer; with normed queries and keys it is Qwen3's."""

    def __init__(self, config: Any, index: int, biased: Collection[str], normed: bool) -> None:
        super().__init__(config, config.hidden_size, biased, index=index, normed=normed)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_ND: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:  # type: ignore[override]
        return super().forward(self.input_layernorm(hidden_ND), hidden_ND, rotation, attend)


class Spd(nn.Module):
    """A module whose rows are a token and its own feature g, made of states from the depth that the row's level names.

    ``levels`` lists the target's hidden states behind each level's feature, 0 being the embedding: level 0 is all that
    is known of a token that enters the pipeline. With ``memory`` (the paper's) rows above level ``asking`` are not
    updated. ``norm`` is the target's own, and ``head`` gives logits over the target's vocabulary.
    """

    def __init__(
        self,
        config: Any,
        layers: int,
        levels: Sequence[Sequence[int]],
        embed_tokens: nn.Module,
        norm: nn.Module,
        head: nn.Module,
        *,
        biased: Collection[str],
        normed: bool,
        memory: bool,
        asking: int = 0,
    ) -> None:
        super().__init__()
        width: int = config.hidden_size
        self.hidden_size = width
        self.levels = [tuple(level) for level in levels]
        self.asking = asking
        # State 0, the embedding, is looked up here instead of being sent.
        self.reads = tuple(sorted({state for level in levels for state in level} - {0}))
        """The states that the target's stages send."""
        self.embed_tokens = embed_tokens
        self.projections = nn.ModuleList(nn.Linear(len(level) * width, width, bias=False) for level in levels)
        self.layers = nn.ModuleList(SpecLayer(config, i, biased, normed) for i in range(layers))
        self.memory = (
            nn.ModuleList(
                nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(len(levels) - 1))
                for _ in range(layers)
            )
            if memory
            else None
        )
        self.rotation = Rotation(config)
        self.norm = norm
        self.head = head

    def fuse(self, level: int, tokens_N: Tensor, states_NF: Tensor) -> Tensor:
        """The features g [N, D] of tokens at one level (Eq. 1); only the states that the level reads count."""
        parts = states_NF.chunk(len(self.reads), dim=-1) if self.reads else ()
        read = (self.embed_tokens(tokens_N) if k == 0 else parts[self.reads.index(k)] for k in self.levels[level])
        feature_ND: Tensor = self.projections[level](torch.cat(list(read), dim=-1))
        return feature_ND

    def forward(self, feature_ND: Tensor, levels_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The states [N, D] for logits, of rows at these levels. ``attend`` stores keys and values."""
        rotation = self.rotation(feature_ND, positions_N)
        # Memory rows enter every layer anew (``_remembered``), and only those above the level that is asked about.
        hidden_ND = feature_ND
        remembered = {
            level: (levels_N == level).nonzero()[:, 0].to(feature_ND.device)
            for level in (levels_N.unique().tolist() if self.memory is not None else ())
            if level > self.asking
        }
        for index, layer in enumerate(self.layers):
            if remembered:
                hidden_ND = self._remembered(index, hidden_ND, feature_ND, remembered)
            hidden_ND = layer(hidden_ND, rotation, attend)
        return hidden_ND

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits after each row, float32 [n, V], from ``forward``'s output; -inf for tokens it cannot draft."""
        logits_nV: Tensor = self.head(self.norm(hidden_nD))
        return logits_nV

    def _remembered(
        self, index: int, hidden_ND: Tensor, feature_ND: Tensor, remembered: Mapping[int, Tensor]
    ) -> Tensor:
        """The input of a layer, where memory rows are replaced by their features through the layer's own projection."""
        assert self.memory is not None
        entering_ND = hidden_ND.clone()
        for level, rows in remembered.items():
            entering_ND[rows] = self.memory[index][level - 1](feature_ND[rows]).to(entering_ND.dtype)
        return entering_ND


# ----------------------------------------------------------------------------------------------------------- spd format
# The fields of SPD's configurations and of early exits', and the tensors that they need.
#
# yuyijiong/speculative_pipeline_decoding writes one ``.pt`` with a state dict and a table, to be converted to
# safetensors and config.json (docs/reference/drafters.md). Penstock writes these itself, with the kind in the field
# ``speculator``.

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

Levels = tuple[tuple[int, ...], ...]
"""The states of the target that are read at each level."""


def _renamed(name: str, deepest: int) -> str:
    """A tensor's name in the module here. Files number depths from the deepest down, levels here count up."""
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
    """A field that has to be a whole number above 0; raises FieldError for any other."""
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
    check_rotation(path, made)
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


# ------------------------------------------------------------------------------------------------------------ spd stage
# SPD's module as a stage: rows at their levels and the target's features to candidates.


class SpdStage(AttendingReader):
    """The speculation module over slots; implements ``stage.driver.Layers`` and ``Reader``.

    A row is a token and its own feature, from states of the depth that the row's level names. A token that has got
    further is computed again in the same slot, so that later rows see it at its present depth:

        step     x0  x1  x2  x3         rows of the batch
          1      g0                     x0
          2      g1  g0                 x0 x1
          3      g2  g1  g0             x0 x1 x2      (two stages: g2 is final for x0)
          4      g2  g2  g1  g0            x1 x2 x3
    """

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        lacking = self.store.missing_features({node for node, _ in awaited})
        if not lacking:
            return lacking
        # A node needs only the states that its level reads: deeper ones may not exist yet.
        level_of = dict(awaited)
        return {(node, state) for node, state in lacking if state in self.module.levels[level_of[node]]}

    @torch.inference_mode()
    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Compute the rows, and store their keys and values. Returns the states [N, D]."""
        if view.levels is None or not 0 <= view.levels.min() <= view.levels.max() < len(self.module.levels):
            raise ProtocolError(f"a row's level is outside the {len(self.module.levels)} of this drafter")
        self.register(view)
        levels_N = torch.from_numpy(view.levels)
        tokens_N = torch.from_numpy(view.tokens).to(self.device)
        feature_ND = torch.empty(len(view), self.hidden_size, dtype=self.dtype, device=self.device)
        for level in np.unique(view.levels).tolist():
            rows = torch.from_numpy(np.flatnonzero(view.levels == level)).to(self.device)
            states_NF = self.store.states(view.slots[view.levels == level])
            feature_ND[rows] = self.module.fuse(level, tokens_N[rows], states_NF).to(self.dtype)
        attend = self.attention(view)
        positions_N = torch.from_numpy(view.positions).to(self.device)
        hidden_ND: Tensor = self.module(feature_ND, levels_N, positions_N, attend)
        return hidden_ND


# ------------------------------------------------------------------------------------------------------- spd checkpoint
# Either variant of SPD's module, or an early exit.


@dataclass(frozen=True, kw_only=True)
class SpdCheckpoint(SpeculatorCheckpoint):
    """Either variant of SPD's module, or an early exit.

    ``levels`` are the states that the module reads for a token, by how far the token has got; ``asking`` is the level
    of the rows that it is asked about.
    """

    stage = SpdStage
    fields = frozenset(
        {
            *(SPECULATOR, "version", "num_stages", "num_spec_layers", "num_aggr_types", "aggr_feature_bound"),
            *("shallow_hidden_layer_indices", "post_state", "draft_token_ids", "draft_vocab_size"),
            "embed_requires_grad",
        }
    )

    levels: Levels
    asking: int

    @classmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        return SPECULATOR in config or any(name.startswith("spec_layers.") for name in tensors)

    @classmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
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
        own = config.get("draft_vocab_size")
        check_equal(path, "draft_vocab_size", own, drafted, "the tokens that it can draft are")
        layer = _layer(path, tensors, target)
        needed, optional = _shapes(layer, depth, levels, drafted, paper=version == PAPER)
        return cls(
            kind=KINDS[stated],
            path=path,
            reads=tuple(sorted({state for level in levels for state in level} - {0})),
            hidden_size=target.hidden_size,
            draft_vocab_size=drafted,
            tensors=check_shapes(path, tensors, needed, optional),
            layer=layer,
            depth=depth,
            stages=stages,
            draft_ids=ids,
            levels=levels,
            asking=1 if config.get("post_state") else 0,
        )

    def build(self, material: Material) -> Spd:
        embedding, head, norm = material.embedding(), material.head(), material.norm()
        with torch.device("meta"):
            return Spd(
                self.layer,
                self.depth,
                self.levels,
                embedding,
                norm,
                head,
                biased=material.biased,
                normed="layers.0.self_attn.q_norm.weight" in material.weights,
                memory=self.stages is not None,
                asking=self.asking,
            )
