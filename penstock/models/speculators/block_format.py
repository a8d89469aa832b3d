"""Checkpoints of block drafters: their configuration in each published dialect, and the tensors that they need.

What a configuration says tells block drafters apart, never a tensor's name: see ``checkpoint.look.block_kind``.
Their layouts: z-lab/dflash's and SpecForge's (Qwen3's fields, and ``dflash_config``), JetSpec's (the same with
``causal_head``), DeepSpec's (DSpark: all fields at the top level, embedding and head of its own), and
vllm-project/speculators' (``transformer_layer_config``, a vocabulary of its own). Headrace is SpecForge's layout of
DSpark with two tensors more. DFlash 2 is any of these that names
``DFlash2DraftModel`` or ``dflash2``, or states one of the fields of its convolutions and its selector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from transformers import AutoConfig

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.look import BLOCK_READ, HEADRACE, block_kind, flat
from penstock.checkpoint.tensors import Tensors
from penstock.models.speculators.base import (
    Material,
    SpeculatorCheckpoint,
    check_equal,
    check_shapes,
    draft_vocabulary,
    refusal,
    stated_depth,
    stated_flag,
    stated_integer,
)
from penstock.models.speculators.block import (
    MOST_SCRATCH,
    BlockModule,
    BlockShape,
    BlockStage,
    CandidateSelector,
    MarkovHead,
)
from penstock.models.speculators.eagle import TAKEN, TYPE_FIELD, bias_shapes, layer_config, layer_shapes

INNER: Final = "dflash_config"
"""z-lab's, SpecForge's and JetSpec's table of the fields that are not Qwen3's."""
LAYERS: Final = "transformer_layer_config"
"""The table of the layers' fields in vllm-project/speculators' configurations."""
NEUTRAL: Final = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "draft_shift": False, "shift_label": False}
"""Fields that would change the computation -> the only value with which they are followed."""
SECOND: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""The fields of DFlash 2's convolutions and of its selector, of which a configuration has all or none."""
INNER_FIELDS: Final = frozenset(
    {
        *("mask_token_id", "target_layer_ids", "block_size", "causal_head", "projector_type", "attention_mode"),
        *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        *SECOND,
        *NEUTRAL,
        "final_logit_softcapping",
    }
)
PROJECTORS: Final = ("dflash", "dspark", HEADRACE, None)
"""Values of ``projector_type`` that are followed."""
MARKOV: Final = ("vanilla", "gated")
"""Types of DSpark's Markov head that are computed."""
DEFAULTS: Final = ("qwen3", "llama")
"""Types of models whose layers' fields may be left out where they are transformers' defaults, as speculators does."""
SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_BLOCK: Final = 16
"""The size of z-lab's blocks where the configuration states none."""


@dataclass(frozen=True)
class _Stated:
    """A configuration in one dialect, as two tables: the layers' fields, and the others."""

    path: Path
    layers: Mapping[str, Any]
    others: Mapping[str, Any]
    offset: int
    """The number added to a listed layer to get a hidden state: 1 where layers' outputs are listed, else 0."""
    taps: str
    """The field that lists the states that are read."""

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A field that has to be a whole number of at least ``least``; raises FieldError for any other."""
        return stated_integer(self.path, self.others, name, default, least)

    def flag(self, name: str) -> bool | None:
        """A field that has to be true, false or left out (None); raises FieldError for any other."""
        return stated_flag(self.path, self.others, name)


def _stated(path: Path, config: Mapping[str, Any]) -> _Stated:
    """The configuration at ``path`` in its dialect. Raises FieldError where its two tables contradict each other."""
    if LAYERS in config:
        layers = config[LAYERS]
        if not isinstance(layers, Mapping):
            raise refusal(path, f"config.json: {LAYERS} is {layers!r}; it has to be a table")
        return _Stated(path, _with_defaults(layers), config, 0, "aux_hidden_state_layer_ids")
    inner = config.get(INNER, {})
    if not isinstance(inner, Mapping):
        raise refusal(path, f"config.json: {INNER} is {inner!r}; it has to be a table")
    if unknown := sorted(inner.keys() - INNER_FIELDS):
        raise refusal(path, f"config.json: {INNER}.{unknown[0]} is {inner[unknown[0]]!r}, which is not known here")
    for name in inner.keys() & config.keys():
        if inner[name] != config[name]:
            raise refusal(path, f"config.json: {name} is {config[name]!r}, and in {INNER} {inner[name]!r}")
    return _Stated(path, _with_defaults(config), {**config, **inner}, 1, "target_layer_ids")


def _with_defaults(layers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layers' fields, completed by transformers' defaults: some files leave out those that equal them."""
    kind = layers.get("model_type", DEFAULTS[0])
    if not isinstance(kind, str) or kind not in DEFAULTS:
        return layers
    usual = AutoConfig.for_model(kind)
    names = [name for name in (*TAKEN, "num_hidden_layers") if not name.startswith("rope_")]
    return {**{name: getattr(usual, name) for name in names if hasattr(usual, name)}, **layers}


def _check_neutral(stated: _Stated, target: Checkpoint) -> None:
    """Raise FieldError for a field that changes the computation in a way that is not followed."""
    for name, neutral in NEUTRAL.items():
        value = stated.others.get(name)
        if value is not None and value != neutral:
            raise refusal(stated.path, f"config.json: {name} is {value!r}, which is not supported; only {neutral} is")
    projector = stated.others.get("projector_type")
    if projector not in PROJECTORS:
        problem = f"projector_type is {projector!r}; only 'dflash', 'dspark' and 'headrace' are supported"
        raise refusal(stated.path, f"config.json: {problem}")
    if stated.others.get("attention_mode") not in ("gqa", None):
        mode = stated.others["attention_mode"]
        raise refusal(stated.path, f"config.json: attention_mode is {mode!r}; only 'gqa' is supported")
    cap = stated.others.get("final_logit_softcapping")
    own = getattr(target.config, "final_logit_softcapping", None)
    if cap is not None and cap != own:
        raise refusal(stated.path, f"config.json: final_logit_softcapping is {cap!r}, the target's is {own}")


def _reads(stated: _Stated, target: Checkpoint) -> tuple[int, ...]:
    """The target's hidden states that are read, in transformers' numbering.

    z-lab counts the layers whose outputs are read, so that its layer k is hidden state k + 1, and -1 the embedding;
    speculators counts hidden states. An error of one is not seen in shapes: it makes drafts worse.
    """
    listed, last = stated.others.get(stated.taps), target.num_layers
    first, end = -stated.offset, last - stated.offset
    if (
        not isinstance(listed, list)
        or not listed
        or not all(type(state) is int and first <= state <= end for state in listed)
    ):
        raise refusal(
            stated.path, f"config.json: {stated.taps} is {listed!r}; it has to be a list of integers, {first} to {end}"
        )
    return tuple(state + stated.offset for state in listed)


def _draft_vocab_size(stated: _Stated, tensors: Tensors, target: Checkpoint) -> int:
    """The number of tokens that can be drafted: as stated, else the head's rows, else the target's vocabulary."""
    size = stated.others.get("draft_vocab_size")
    if size is None:
        return tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else target.vocab_size
    return stated.integer("draft_vocab_size")


def _shape(stated: _Stated, depth: int, target: Checkpoint, *, markov: bool, partial: bool) -> BlockShape:
    """The shape of its blocks. Raises FieldError for a value that is not followed."""
    size = stated.integer("block_size", None if stated.offset == 0 or markov else DEFAULT_BLOCK, least=2)
    if size > MOST_SCRATCH:
        raise refusal(
            stated.path, f"config.json: block_size is {size}; at most {MOST_SCRATCH} rows are computed at once"
        )
    mask = stated.integer("mask_token_id", least=0)
    if mask >= target.vocab_size:
        raise refusal(stated.path, f"config.json: mask_token_id is {mask}; the target has {target.vocab_size} tokens")
    windows = _windows(stated, depth)
    causal, everywhere = stated.flag("is_causal"), bool(stated.flag("causal_head"))
    sliding = not stated.flag("sliding_window_non_causal") if causal is None else causal
    from_anchor, head = stated.flag("sample_from_anchor"), stated.others.get("markov_head_type") if markov else ""
    if markov and head not in MARKOV:
        raise refusal(
            stated.path, f"config.json: markov_head_type is {head!r}; {' and '.join(map(repr, MARKOV))} are supported"
        )
    second = _second(stated, target)
    if markov and second:
        raise refusal(stated.path, "it has both a Markov head and DFlash 2's selector: remove the fields of one")
    return BlockShape(
        size=size,
        mask_token=mask,
        from_anchor=markov if from_anchor is None else from_anchor,
        causal=tuple(everywhere or (sliding if kind == SLIDING else bool(causal)) for kind, _ in windows),
        windows=tuple(window for _, window in windows),
        markov=head or "",
        partial=partial,
        **(second or {"rank": stated.integer("markov_rank") if markov else 0}),
    )


def _second(stated: _Stated, target: Checkpoint) -> dict[str, int]:
    """The fields of the shape that DFlash 2's blocks have and others do not; empty for another drafter's."""
    names = flat([stated.others.get(field) for field in ("architectures", TYPE_FIELD)])
    named = any(name.lower().startswith("dflash2") for name in names)
    if not named and all(stated.others.get(field) is None for field in SECOND):
        return {}
    taps, group, rank, compared = map(stated.integer, SECOND)
    width = stated.layers["hidden_size"]
    if width % group:
        raise refusal(stated.path, f"config.json: conv_group_size is {group}; it has to divide hidden_size, {width}")
    if compared > target.vocab_size:
        raise refusal(
            stated.path, f"config.json: selector_top_k is {compared}; the target has {target.vocab_size} tokens"
        )
    return {"taps": taps, "group": group, "rank": rank, "compared": compared}


def _add_markov(
    stated: _Stated,
    shape: BlockShape,
    width: int,
    vocab: int,
    target: Checkpoint,
    needed: dict[str, Any],
    optional: dict[str, Any],
) -> None:
    """Add the tensors of DSpark's and Headrace's heads.

    The confidence head is known, and nothing is computed with it: chances are calibrated by what the target accepts.
    """
    head = "markov_head"
    needed |= {
        f"{head}.markov_w1.weight": (target.vocab_size, shape.rank),
        f"{head}.markov_w2.weight": (vocab, shape.rank),
    }
    if shape.markov == "gated":
        needed |= {
            f"{head}.gate_proj.weight": (shape.rank, width + shape.rank),
            f"{head}.gate_proj.bias": (shape.rank,),
        }
    known = width + (shape.rank if stated.flag("confidence_head_with_markov") is not False else 0)
    optional |= {"confidence_head.proj.weight": (1, known), "confidence_head.proj.bias": (1,)}


def _add_second(shape: BlockShape, depth: int, width: int, target: Checkpoint, needed: dict[str, Any]) -> None:
    """Add the tensors of DFlash 2's convolutions and of its selector."""
    for i in range(depth):
        for name in ("attention_conv", "mlp_conv"):
            needed[f"layers.{i}.{name}.base_kernel"] = (2, shape.taps, width)
            needed[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * shape.taps * (width // shape.group), width)
    codebook = (target.vocab_size, shape.rank)
    needed |= {f"candidate_selector.{name}_codebook": codebook for name in ("predecessor", "successor")}
    needed["candidate_selector.hidden_projection.weight"] = (shape.rank, width)


def _windows(stated: _Stated, depth: int) -> list[tuple[str, int | None]]:
    """Each layer's kind and window. As in Qwen3's configuration, windows count where ``use_sliding_window`` is set."""
    fields = stated.layers
    window, used, kinds = (fields.get(name) for name in ("sliding_window", "use_sliding_window", "layer_types"))
    if kinds is None:
        if window is not None and used:
            raise refusal(stated.path, "config.json: sliding_window is set without layer_types, which say where")
        return [(FULL, None)] * depth
    if not isinstance(kinds, list) or len(kinds) != depth or not set(kinds) <= {SLIDING, FULL}:
        raise refusal(
            stated.path,
            f"config.json: layer_types is {kinds!r}; it has to list {FULL} or {SLIDING} for {depth} layers, as many as "
            "num_hidden_layers",
        )
    if SLIDING not in kinds:
        return [(kind, None) for kind in kinds]
    size = stated.others.get("block_size", DEFAULT_BLOCK)
    if used is False or type(window) is not int or window < size:
        raise refusal(
            stated.path,
            f"config.json: sliding_window is {window!r} and use_sliding_window {used!r}, though layers slide; the "
            f"window has to be at least the block's {size}",
        )
    return [(kind, window if kind == SLIDING else None) for kind in kinds]


def _shapes(layer: Any, depth: int, states: int, target: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The needed and the optional tensors, without head and draft vocabulary."""
    width = layer.hidden_size
    needed: dict[str, Any] = {
        "fc.weight": (width, states * target.hidden_size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    optional: dict[str, Any] = {"t2d": (target.vocab_size,), "embed_tokens.weight": (target.vocab_size, width)}
    for i in range(depth):
        needed |= layer_shapes(f"layers.{i}", layer, width)
        needed[f"layers.{i}.input_layernorm.weight"] = (width,)
        needed |= {f"layers.{i}.self_attn.{name}.weight": (layer.head_dim,) for name in ("q_norm", "k_norm")}
        optional |= bias_shapes(f"layers.{i}", layer)
    return needed, optional


@dataclass(frozen=True, kw_only=True)
class BlockCheckpoint(SpeculatorCheckpoint):
    """DFlash, DFlash 2, DSpark, JetSpec or Headrace; ``shape`` says how it drafts."""

    stage = BlockStage
    fields = frozenset(
        {
            *("draft_vocab_size", "target_hidden_size", "num_target_layers", "target_num_hidden_layers"),
            *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_non_causal"),
            *("is_causal", "aux_hidden_state_layer_ids", "sample_from_anchor", "num_anchors", "embed_requires_grad"),
            *(LAYERS, TYPE_FIELD, "speculators_version", "speculators_config", INNER, *INNER_FIELDS),
        }
    )

    shape: BlockShape

    @property
    def methods(self) -> tuple[str, ...]:
        # JetSpec's module is DFlash's in all but what its rows see, which the file says.
        return ("jetspec", "dflash") if self.kind == "jetspec" else (self.kind,)

    @classmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        return block_kind(config) is not None

    @classmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
        kind = block_kind(config)
        if kind not in BLOCK_READ:
            raise refusal(path, f"it is a drafter of kind {kind}, which is not supported yet; use another one")
        stated = _stated(path, config)
        layer = layer_config(path, stated.layers, stated.layers, target, depth=None)
        depth = stated_depth(path, stated.layers, tensors)
        check_equal(path, "hidden_size", layer.hidden_size, target.hidden_size, "the target's")
        for name in ("num_target_layers", "target_num_hidden_layers"):
            check_equal(path, name, config.get(name), target.num_layers, "the target's layers are")
        own_target = config.get("target_hidden_size")
        check_equal(path, "target_hidden_size", own_target, target.hidden_size, "the target's width")
        _check_neutral(stated, target)
        reads = _reads(stated, target)
        vocab = _draft_vocab_size(stated, tensors, target)
        shape = _shape(stated, depth, target, markov=kind in ("dspark", HEADRACE), partial=kind == HEADRACE)
        needed, optional = _shapes(layer, depth, len(reads), target)
        if shape.markov:
            _add_markov(stated, shape, layer.hidden_size, vocab, target, needed, optional)
        if shape.compared:
            _add_second(shape, depth, layer.hidden_size, target, needed)
        if shape.partial:
            needed |= {"partial.weight": needed["fc.weight"], "partial_norm.weight": needed["hidden_norm.weight"]}
        biases = stated.layers.get("attention_bias")
        if biases is not None and bool(biases) != ("layers.0.self_attn.q_proj.bias" in tensors):
            raise refusal(path, f"config.json: attention_bias is {biases!r}, which the file's tensors contradict")
        # llama.cpp's files hold the tokens' ids themselves, where d2t holds differences.
        mapped = draft_vocabulary(path, tensors, "token_map" if "token_map" in tensors else "d2t", vocab, target)
        (needed if mapped else optional)["lm_head.weight"] = (vocab, layer.hidden_size)
        return cls(
            kind=kind,  # type: ignore[arg-type]
            path=path,
            reads=reads,
            hidden_size=layer.hidden_size,
            draft_vocab_size=vocab,
            tensors=check_shapes(path, tensors, {**needed, **mapped}, optional),
            layer=layer,
            depth=depth,
            shape=shape,
        )

    def build(self, material: Material) -> BlockModule:
        embedding, head, shape = material.embedding(), material.head(), self.shape
        width, states = self.hidden_size, material.weights["fc.weight"].shape[1]
        markov = selector = None
        with torch.device("meta"):
            if shape.markov:
                drafted, gated = self.draft_vocab_size, shape.markov == "gated"
                markov = MarkovHead(width, shape.rank, drafted, material.vocabulary, gated=gated)
            if shape.compared:
                selector = CandidateSelector(width, shape.rank, material.vocabulary.vocab_size)
            return BlockModule(
                self.layer,
                shape,
                states,
                embedding,
                head,
                biased=material.biased,
                markov_head=markov,
                candidate_selector=selector,
            )
