"""EAGLE, EAGLE-2, EAGLE-3 and EAGLE-3.1: modules, checkpoint formats, and the stage that answers with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.config_fields import check_rope, check_values
from penstock.checkpoint.tensors import Tensors
from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, said
from penstock.models.attention import Attend
from penstock.models.probe import LENGTH_DEPENDENT, rope_kinds
from penstock.models.speculators.base import (
    AttendingReader,
    DecoderLayer,
    FeatureReader,
    Kind,
    Material,
    Rotation,
    Shapes,
    SpeculatorCheckpoint,
    check_equal,
    check_rotation,
    check_shapes,
    draft_vocabulary,
    refusal,
    stated_flag,
)
from penstock.stage.visibility import BatchView, RequestView

# ---------------------------------------------------------------------------------------------------------------- eagle
# EAGLE's modules: the next token's embedding beside hidden states of the target, through one layer.
#
# Source: Li et al., EAGLE (arXiv 2401.15077), section 3.1, and EAGLE-3 (arXiv 2503.01840), section 3; SafeAILab/EAGLE,
# cnets1.py and cnets.py; vllm-project/speculators for ``norm_before_residual`` and ``norm_before_fc``. The norms
# of EAGLE-3.1 are those of arXiv 2605.09992, as vllm-project/speculators and SpecForge store them (``fc_norm``,
# ``norm_output``). Shapes as in base.py.


class Eagle(nn.Module):
    """EAGLE-1, whose weights also serve EAGLE-2, over the target's last hidden state.

    A row is a token and the feature of the token before it; the output predicts the token's own feature. A feature is
    the target's final hidden state after its norm. ``head`` gives logits over the target's vocabulary. ``fc_bias`` and
    ``biased`` say which projections have a bias in the checkpoint.
    """

    def __init__(
        self, config: Any, embed_tokens: nn.Module, head: nn.Module, *, fc_bias: bool, biased: Collection[str]
    ) -> None:
        super().__init__()
        self.hidden_size: int = config.hidden_size
        self.embed_tokens = embed_tokens
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, config.hidden_size, biased)])
        self.rotation = Rotation(config)
        self.head = head

    def fuse(self, features_NF: Tensor) -> Tensor:
        """The features [N, D] that rows take from the target's states [N, F]: here F = D, and they are the same."""
        return features_NF

    def forward(self, tokens_N: Tensor, feature_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The predicted features [N, D] of the rows' own tokens. ``attend`` stores keys and values: see ``Attend``."""
        hidden_ND = self.fc(torch.cat([self.embed_tokens(tokens_N), feature_ND], dim=-1))
        return self.layers[0](hidden_ND, hidden_ND, self.rotation(hidden_ND, positions_N), attend)

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits of the token after each row, float32 [n, V], from the output of ``forward``."""
        return self.head(hidden_nD)


class MidLayer(DecoderLayer):
    """A layer that attends over embedding and feature side by side; its residual is the feature alone.

    With ``norm_before_residual`` the residual is the normed feature.
    """

    def __init__(self, config: Any, biased: Collection[str], norm_before_residual: bool) -> None:
        super().__init__(config, 2 * config.hidden_size, biased)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def join(self, embedding_ND: Tensor, feature_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the attention [N, 2D], and the residual [N, D]."""
        normed_ND = self.hidden_norm(feature_ND)
        entering_NI = torch.cat([self.input_layernorm(embedding_ND), normed_ND], dim=-1)
        return entering_NI, normed_ND if self._norm_before_residual else feature_ND


class Eagle3(nn.Module):
    """EAGLE-3, over fused states of three of the target's layers.

    A row is a token and the feature of the token before it; the output predicts the token's own feature. A feature is
    ``fuse`` of the target's states, or the output of the row before. ``features_width`` is F, the width of all the
    states that it reads side by side. ``head`` gives logits over the target's vocabulary.

    EAGLE-3.1 norms each of the states that it reads by itself (``normed_states``, their number; 0 if it does not), and
    hands on its output after the last norm (``norm_output``).
    """

    def __init__(
        self,
        config: Any,
        features_width: int,
        embed_tokens: nn.Module,
        head: nn.Module,
        *,
        biased: Collection[str],
        norm_before_residual: bool,
        norm_before_fc: bool,
        normed_states: int = 0,
        norm_output: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size: int = config.hidden_size
        self.embed_tokens = embed_tokens
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(features_width // normed_states, config.rms_norm_eps) for _ in range(normed_states)
        )
        self.input_norm = LlamaRMSNorm(features_width, config.rms_norm_eps) if norm_before_fc else nn.Identity()
        self.fc = nn.Linear(features_width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config, biased, norm_before_residual)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotation = Rotation(config)
        self.head = head
        self._norm_output = norm_output

    def fuse(self, features_NF: Tensor) -> Tensor:
        """The features [N, D] that rows take from the target's states [N, F]."""
        if self.fc_norm:
            states = features_NF.chunk(len(self.fc_norm), dim=-1)
            features_NF = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(self.input_norm(features_NF))

    def forward(self, tokens_N: Tensor, feature_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The predicted features [N, D] of the rows' own tokens: before the norm, or behind it with ``norm_output``.

        ``attend`` stores keys and values.
        """
        entering_NI, residual_ND = self.midlayer.join(self.embed_tokens(tokens_N), feature_ND)
        hidden_ND = self.midlayer(entering_NI, residual_ND, self.rotation(feature_ND, positions_N), attend)
        return self.norm(hidden_ND) if self._norm_output else hidden_ND

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits after each row, float32 [n, V], from ``forward``'s output; -inf for tokens it cannot draft."""
        return self.head(hidden_nD if self._norm_output else self.norm(hidden_nD))


# --------------------------------------------------------------------------------------------------------- eagle format
# The fields of EAGLE-1's and EAGLE-3's configurations, and the tensors that they need, with shapes.

log = logging.getLogger(__name__)

NEEDED: Final = ("hidden_size", "intermediate_size", "num_attention_heads")
"""Fields of a configuration that have to be whole numbers above 0."""
TAKEN: Final = (
    *NEEDED,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""Fields of a configuration that shape the layer; LlamaConfig has the defaults."""

DEFAULT_THETA: Final = 10000.0
"""Base of the rotary frequencies where the configuration has none."""
AUX_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
"""The field of EAGLE-3's configurations that lists the target's hidden states that are read."""
INNER: Final = "eagle_config"
"""A table in SafeAILab's and vLLM's configurations of EAGLE-3 that holds some of its fields."""
FC_NORM: Final = "fc_norm"
"""The field of EAGLE-3.1 that asks for a norm for each state, and the beginning of these norms' names."""
INNER_FIELDS: Final = frozenset(
    {AUX_LAYERS, "use_aux_hidden_state", "norm_before_fc", "norm_before_residual", FC_NORM, "norm_output"}
)
"""Fields of that table that are known."""


def flattened(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration joined with its ``eagle_config``. Raises FieldError for an unknown field in that."""
    inner = config.get(INNER)
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise refusal(path, f"config.json: {INNER} is {inner!r}; it has to be a table")
    if unknown := sorted(inner.keys() - INNER_FIELDS):
        raise refusal(path, f"config.json: {INNER}.{unknown[0]} is {inner[unknown[0]]!r}, which is not known here")
    if inner.get("use_aux_hidden_state") is False:
        raise refusal(path, f"config.json: {INNER}.use_aux_hidden_state is false, which is not supported")
    for name in inner.keys() & config.keys():
        if inner[name] != config[name]:
            raise refusal(path, f"config.json: {name} is {config[name]!r}, and in {INNER} {inner[name]!r}")
    return {**config, **inner}


def _eagle3_shapes(layer: Any, features: int, target: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The needed and the optional tensors, without head and draft vocabulary. ``features`` is its input's width."""
    width = layer.hidden_size
    needed: dict[str, Any] = {
        "fc.weight": (width, features),
        "norm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        **layer_shapes("midlayer", layer, 2 * width),
    }
    optional = {
        "t2d": (target.vocab_size,),
        "input_norm.weight": (features,),
        **bias_shapes("midlayer", layer),
    }
    embedding = {"embed_tokens.weight": (target.vocab_size, width)}
    (optional if width == target.hidden_size else needed).update(embedding)
    return needed, optional


def layer_shapes(prefix: str, layer: Any, width: int) -> Shapes:
    """The matrices of a Llama layer whose attention has inputs of ``width``, and its second norm."""
    hidden, inner = layer.hidden_size, layer.intermediate_size
    heads, key_heads = (n * layer.head_dim for n in (layer.num_attention_heads, layer.num_key_value_heads))
    shapes = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (key_heads, width),
        "self_attn.v_proj": (key_heads, width),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def bias_shapes(prefix: str, layer: Any) -> Shapes:
    """The biases of the attention's projections in a Llama layer."""
    attention = layer_shapes(prefix, layer, 0).items()
    return {name.replace("weight", "bias"): shape[:1] for name, shape in attention if "self_attn" in name}


def layer_config(path: Path, config: Mapping[str, Any], layer: Any, target: Checkpoint, depth: int | None = 1) -> Any:
    """The LlamaConfig of a drafter's layers, from ``layer``, config.json's table of them.

    ``depth`` is the only number of layers that is read; None where there may be any.
    """
    if not config:
        raise refusal(path, "there is no config.json beside its tensors: download it again")
    if not isinstance(layer, Mapping):
        raise refusal(path, f"config.json: transformer_layer_config is {layer!r}; it has to be a table")
    for name in NEEDED:
        if type(layer.get(name)) is not int or layer[name] < 1:
            raise refusal(path, f"config.json: {name} is {layer.get(name)!r}; it has to be an integer above 0")
    if depth is not None:
        check_equal(path, "num_hidden_layers", layer.get("num_hidden_layers"), depth, "EAGLE's is")
    check_equal(path, "vocab_size", layer.get("vocab_size"), target.vocab_size, "the target's")
    stated = {name: layer[name] for name in TAKEN if layer.get(name) is not None}
    _check_values(path, stated, stated)
    try:
        made = LlamaConfig(**stated)
    except Exception as error:
        raise refusal(path, f"config.json cannot be used: {said(error)}") from error
    _warn_of_theta(path, layer, target)
    # The class moves the rotary fields together, and turns the names of older files into today's.
    _check_values(path, {"rope_parameters": made.rope_parameters or {}}, stated)
    if made.num_key_value_heads < 1 or made.num_attention_heads % made.num_key_value_heads:
        raise refusal(
            path,
            f"config.json: num_key_value_heads is {made.num_key_value_heads}; it has to divide the "
            f"{made.num_attention_heads} attention heads",
        )
    if kinds := rope_kinds(made) & LENGTH_DEPENDENT:
        raise refusal(path, f"its {', '.join(kinds)} rope depends on the longest request, which is not supported")
    check_rotation(path, made)
    return made


def _check_values(path: Path, table: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """Raise FieldError for a value in ``table`` that no model's configuration may have; ``stated`` is the file's."""
    file = Path(CONFIG_FILE)
    try:
        check_values(table, file, stated)
        check_rope(table, file, stated)
    except ConfigError as error:
        raise refusal(path, str(error).removeprefix("model: ")) from error


def _warn_of_theta(path: Path, layer: Mapping[str, Any], target: Checkpoint) -> None:
    if layer.get("rope_theta") is not None or "rope_theta" in (layer.get("rope_parameters") or {}):
        return
    theta = (getattr(target.config, "rope_parameters", None) or {}).get("rope_theta")
    if theta != DEFAULT_THETA:
        log.warning(
            "%s: config.json has no rope_theta: %s is taken, as EAGLE's own code does, not the target's %s",
            path,
            DEFAULT_THETA,
            theta,
        )


def _agrees(path: Path, config: Mapping[str, Any], field: str, default: bool, tensors: Tensors, name: str) -> bool:
    """Whether the file holds the tensor that a field announces. Raises FieldError if the field says otherwise."""
    held = name in tensors
    stated = stated_flag(path, config, field)
    if stated is None and held != default:
        has = "has" if held else "lacks"
        log.warning(
            "%s: config.json has no %s, which usually means %s, but the file %s %s: the file is followed",
            path,
            field,
            default,
            has,
            name,
        )
    if stated is not None and stated != held:
        raise refusal(path, f"config.json: {field} is {stated}, but the file {'holds' if held else 'lacks'} {name}")
    return held


def _norm_output(path: Path, config: Mapping[str, Any], normed: bool) -> bool:
    """Whether the module hands on its output behind the last norm. No tensor tells; without the field it is false."""
    stated = stated_flag(path, config, "norm_output")
    if stated is None and normed:
        log.warning(
            "%s: config.json has no norm_output: false is taken, though EAGLE-3.1's modules with norms of each state "
            "usually have it. If drafts are seldom accepted, set it",
            path,
        )
    return bool(stated)


def _norm_before_residual(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether the residual is the normed feature. No tensor tells; without the field it is false."""
    stated = stated_flag(path, config, "norm_before_residual")
    if stated is None and "transformer_layer_config" in config:
        log.warning(
            "%s: config.json has no norm_before_residual: false is taken, as vllm-project/speculators does; vLLM takes "
            "true. If drafts are seldom accepted, set it",
            path,
        )
    return bool(stated)


def _reads(path: Path, config: Mapping[str, Any], target: Checkpoint) -> tuple[int, ...]:
    """The target's hidden states that are read: 2, half of the layers and three from the last, unless stated."""
    last = target.num_layers
    stated = config.get(AUX_LAYERS)
    reads = [2, last // 2, last - 3] if stated in (None, []) else stated
    if not isinstance(reads, list) or not all(isinstance(index, int) and 0 <= index <= last for index in reads):
        raise refusal(path, f"{AUX_LAYERS} is {reads}; it has to be a list of the target's hidden states, 0 to {last}")
    return tuple(reads)


def _draft_vocab_size(path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> int:
    """The number of tokens that can be drafted: as stated, else the head's rows, else the target's vocabulary."""
    stated = config.get("draft_vocab_size")
    if stated is None:
        return tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else target.vocab_size
    if not isinstance(stated, int):
        raise refusal(path, f"config.json: draft_vocab_size is {stated!r}; it has to be an integer")
    return stated


Further = Callable[[Any, int], Shapes]
"""Gives the tensors that a kind needs beside EAGLE-3's, from the LlamaConfig of its layers and the width of the states
that it reads side by side."""


def eagle3_fields(
    path: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    target: Checkpoint,
    *,
    depth: int | None = 1,
    further: Further = lambda layer, features: {},
) -> dict[str, Any]:
    """The fields of ``Eagle3Checkpoint`` but its kind, of files that fit ``target``; raises FieldError for others.

    ``depth`` is the only number of layers that is read; None where there may be any.
    """
    layer = layer_config(path, config, config.get("transformer_layer_config", config), target, depth)
    own_target = config.get("target_hidden_size")
    check_equal(path, "target_hidden_size", own_target, target.hidden_size, "the target's width")
    first = "layers.0." if any(name.startswith("layers.0.") for name in tensors) else "midlayer."
    tensors = {name.replace("layers.0.", "midlayer."): stored for name, stored in tensors.items()}
    reads = _reads(path, config, target)
    draft_vocab = _draft_vocab_size(path, config, tensors, target)
    features = len(reads) * target.hidden_size
    needed, optional = _eagle3_shapes(layer, features, target)
    normed = _agrees(path, config, FC_NORM, False, tensors, f"{FC_NORM}.0.weight")
    if normed:
        needed |= {f"{FC_NORM}.{i}.weight": (target.hidden_size,) for i in range(len(reads))}
    mapped = draft_vocabulary(path, tensors, "d2t", draft_vocab, target)
    head = {"lm_head.weight": (draft_vocab, layer.hidden_size)}
    (needed if mapped or layer.hidden_size != target.hidden_size else optional).update(head)
    needed |= {**mapped, **further(layer, features)}
    return {
        "path": path,
        "reads": reads,
        "hidden_size": layer.hidden_size,
        "draft_vocab_size": draft_vocab,
        "tensors": check_shapes(path, tensors, needed, optional, lambda name: name.replace("midlayer.", first)),
        "layer": layer,
        "norm_before_residual": _norm_before_residual(path, config),
        "norm_before_fc": _agrees(path, config, "norm_before_fc", False, tensors, "input_norm.weight"),
        "normed_states": len(reads) if normed else 0,
        "norm_output": _norm_output(path, config, normed),
    }


# ---------------------------------------------------------------------------------------------------------- eagle stage
# EAGLE's modules and MTP heads as a stage: rows and the target's features to candidates.


class EagleStage(AttendingReader):
    """A module over slots whose rows are a token and a feature each; implements ``stage.driver.Layers`` and ``Reader``.

    A row is a token and the feature of its parent: the target's if it has arrived, else the module's own output for the
    parent's row. Rows whose parents are in the same batch therefore wait for them, level by level; where the target's
    features are there, as for a prompt, all rows go together. As in EAGLE's own code a token at position p is rotated
    by p - 1, and the very first token, which has no predecessor, is seen by no other.
    """

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._own_SD = torch.zeros(capacity, module.hidden_size, dtype=self.dtype, device=device)
        self._own_node = np.zeros(capacity, dtype=np.int64)

    def forget(self) -> None:
        super().forget()
        self._own_SD.zero_()
        self._own_node[:] = 0

    @torch.inference_mode()
    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Compute the rows; store their keys, values and the module's output [N, D]."""
        self.register(view)
        output_ND = self._own_SD.new_zeros(len(view), self.hidden_size)
        left = np.arange(len(view))
        # Level by level: a row needs its parent's output where the target's states of the parent have not arrived.
        while len(left):
            ready = left[self._has_feature(view, left)]
            if not len(ready):
                raise ConfigError("a drafter's row came before its parent's")
            output_ND[torch.from_numpy(ready)] = self._level(subset(view, ready))
            left = np.setdiff1d(left, ready, assume_unique=True)
        return output_ND

    def _has_feature(self, view: BatchView, rows: np.ndarray) -> np.ndarray:
        """Whether a feature is there for each row: none is needed, the target's states, or the module's own output."""
        parents = view.parents[rows]
        nodes = self.nodes_in(parents)
        there: np.ndarray = (parents < 0) | self.store.has(parents, nodes) | (self._own_node[parents] == nodes)
        return there

    def _level(self, view: BatchView) -> Tensor:
        """Compute rows whose features are all there; store and return the module's output [N, D]."""
        nodes = self.nodes_in(view.parents)
        true = self.store.has(view.parents, nodes)
        feature_ND = self._own_SD[torch.from_numpy(view.parents)]
        # A row without a parent has read the last slot (index -1); its feature is zero.
        feature_ND[torch.from_numpy(view.parents < 0)] = 0
        if true.any():
            rows = torch.from_numpy(np.flatnonzero(true))
            feature_ND[rows] = self.module.fuse(self.store.states(view.parents[true])).to(feature_ND.dtype)
        seen = replace(view, views=[blind(request) for request in view.views])
        attend = self.attention(seen)
        tokens_N = torch.from_numpy(view.tokens).to(self.device)
        # A row at position p holds token p and the feature of token p - 1, and is rotated by p - 1.
        positions_N = torch.from_numpy(np.maximum(view.positions - 1, 0)).to(self.device)
        output_ND: Tensor = self.module(tokens_N, feature_ND, positions_N, attend)
        slots = torch.from_numpy(view.slots)
        self._own_SD[slots] = output_ND
        # Own outputs stay valid until another node takes the slot; ``_own_node`` says whose they are.
        self._own_node[view.slots] = view.nodes
        return output_ND


def subset(view: BatchView, rows: np.ndarray) -> BatchView:
    """Some of a batch's rows, in order, with the slots that they see."""
    if len(rows) == len(view):
        return view
    # ``place`` maps a row's index in the batch to its index among the kept rows, -1 for rows that are left out.
    place = np.full(len(view), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    views = []
    for request in view.views:
        kept = place[request.rows] >= 0
        if kept.any():
            seen = request.mask[kept].any(axis=0)
            part = place[request.rows[kept]]
            views.append(
                RequestView(
                    request.request, part, request.slots[seen], request.positions[seen], request.mask[kept][:, seen]
                )
            )
    return BatchView(
        view.requests[rows],
        view.nodes[rows],
        view.slots[rows],
        view.positions[rows],
        view.tokens[rows],
        views,
        view.parents[rows],
    )


def blind(view: RequestView) -> RequestView:
    """The view with the row at position 0 hidden from all others, since it has no feature."""
    mask = view.mask.copy()
    # The row at position 0 still sees itself: a row that saw nothing would give NaN.
    others = mask.sum(axis=1) > 1
    mask[np.ix_(others, view.positions == 0)] = False
    return RequestView(view.request, view.rows, view.slots, view.positions, mask)


# ---------------------------------------------------------------------------------------------------- eagle checkpoints
# The two kinds as they are opened: SafeAILab's layouts of EAGLE-1 (cnets1), which EAGLE-2 shares, and of EAGLE-3
# (cnets), and vllm-project/speculators' of EAGLE-3.

TYPE_FIELD: Final = "speculators_model_type"
"""The field that names the kind in vllm-project/speculators' configurations."""


@dataclass(frozen=True, kw_only=True)
class EagleCheckpoint(SpeculatorCheckpoint):
    """EAGLE-1 or EAGLE-2."""

    stage = EagleStage
    fields = frozenset({"bias"})

    kind: Kind = "eagle"

    @classmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        return "fc.weight" in tensors

    @classmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
        layer = layer_config(path, config, config, target)
        check_equal(path, "hidden_size", layer.hidden_size, target.hidden_size, "the target's")
        _agrees(path, config, "bias", True, tensors, "fc.bias")
        width, vocab = layer.hidden_size, target.vocab_size
        needed = {"fc.weight": (width, 2 * width), **layer_shapes("layers.0", layer, width)}
        optional = {
            "fc.bias": (width,),
            "embed_tokens.weight": (vocab, width),
            "lm_head.weight": (vocab, width),
            **bias_shapes("layers.0", layer),
        }
        return cls(
            path=path,
            reads=(target.num_layers,),
            hidden_size=width,
            draft_vocab_size=vocab,
            tensors=check_shapes(path, tensors, needed, optional),
            layer=layer,
        )

    def build(self, material: Material) -> Eagle:
        embedding, head = material.embedding(), material.head()
        with torch.device("meta"):
            return Eagle(self.layer, embedding, head, fc_bias="fc.bias" in material.weights, biased=material.biased)


@dataclass(frozen=True, kw_only=True)
class Eagle3Checkpoint(SpeculatorCheckpoint):
    """EAGLE-3 or EAGLE-3.1; the fields are those of ``Eagle3``."""

    stage: ClassVar[type[FeatureReader]] = EagleStage
    fields = frozenset(
        {
            *("bias", "draft_vocab_size", "target_hidden_size", "embed_requires_grad", INNER, *INNER_FIELDS),
            *("transformer_layer_config", TYPE_FIELD, "speculators_version", "speculators_config"),
        }
    )

    kind: Kind = "eagle3"
    norm_before_residual: bool
    norm_before_fc: bool
    normed_states: int
    norm_output: bool

    @classmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        return (
            config.get(TYPE_FIELD) is not None
            or any(name.startswith("midlayer.") for name in tensors)
            or "layers.0.hidden_norm.weight" in tensors
        )

    @classmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
        if (stated := config.get(TYPE_FIELD)) not in (None, "eagle3"):
            supported = "'eagle3', 'peagle', 'dflash', 'dflash2' and 'dspark' are supported"
            raise refusal(path, f"config.json: {TYPE_FIELD} is {stated!r}; {supported}")
        return cls(**eagle3_fields(path, flattened(path, config), tensors, target))

    def build(self, material: Material) -> Eagle3:
        embedding, head = material.embedding(), material.head()
        with torch.device("meta"):
            return Eagle3(
                self.layer,
                material.weights["fc.weight"].shape[1],
                embedding,
                head,
                biased=material.biased,
                norm_before_residual=self.norm_before_residual,
                norm_before_fc=self.norm_before_fc,
                normed_states=self.normed_states,
                norm_output=self.norm_output,
            )
