"""P-EAGLE: EAGLE-3's layer and further ones over rows of all depths at once; module, checkpoints, and the stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.look import block_kind
from penstock.checkpoint.tensors import StoredTensor, Tensors
from penstock.models.attention import Attend
from penstock.models.speculators.base import (
    Kind,
    Material,
    Shapes,
    check_equal,
    refusal,
    stated_depth,
    stated_flag,
    stated_integer,
)
from penstock.models.speculators.block import MOST_SCRATCH, Block, BlockAttention, BlockShape, BlockStage
from penstock.models.speculators.eagle import (
    TYPE_FIELD,
    Eagle3,
    Eagle3Checkpoint,
    bias_shapes,
    eagle3_fields,
    flattened,
    layer_shapes,
    subset,
)
from penstock.models.speculators.spd import SpecLayer
from penstock.stage.visibility import BatchView, RequestView

# --------------------------------------------------------------------------------------------------------------- peagle
# P-EAGLE's module (arXiv 2602.01469; vllm-project/speculators, models/peagle; NVIDIA-NeMo/Automodel). Shapes as in
# block.py.


class Peagle(Eagle3):
    """EAGLE-3's module with further layers behind its own, whose rows of all depths go through together.

    A row at depth 0 is a token and the states of the token before it, as in EAGLE-3. Rows behind it have no states:
    ``mask_hidden`` takes their place. Where their tokens are not known either, they are ``shape.mask_token``.
    """

    def __init__(
        self,
        config: Any,
        shape: BlockShape,
        embed_tokens: nn.Module,
        head: nn.Module,
        mask_shape: Sequence[int],
        *,
        biased: Collection[str],
        norm_before_residual: bool,
        norm_before_fc: bool,
        normed_states: int,
    ) -> None:
        """``mask_shape`` is the shape in which the file holds ``mask_hidden``."""
        super().__init__(
            config,
            mask_shape[-1],
            embed_tokens,
            head,
            biased=biased,
            norm_before_residual=norm_before_residual,
            norm_before_fc=norm_before_fc,
            normed_states=normed_states,
            # No row reads another's output, so that the last norm may always be a part of it.
            norm_output=True,
        )
        self.shape = shape
        self.mask_hidden = nn.Parameter(torch.empty(*mask_shape))
        # By the numbers that their names have in the file, where the first one is EAGLE-3's.
        self.layers = nn.ModuleDict(
            {str(i): SpecLayer(config, i, biased, normed=False) for i in range(1, len(shape.causal))}
        )

    def masked(self) -> Tensor:
        """The feature [1, D] of a row without states."""
        return self.fuse(self.mask_hidden.reshape(1, -1))

    def forward(self, tokens_N: Tensor, feature_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The states [N, D] of the rows, normed. ``attend`` stores keys and values: see ``Attend``."""
        rotation = self.rotation(feature_ND, positions_N)
        hidden_ND = self.midlayer(*self.midlayer.join(self.embed_tokens(tokens_N), feature_ND), rotation, attend)
        for layer in self.layers.values():
            hidden_ND = layer(hidden_ND, rotation, attend)
        return self.norm(hidden_ND)

    def entering(self, hidden_nD: Tensor, before_n: Tensor) -> Tensor:
        """The input [n, D] of ``logits``: rows of ``forward``'s output. ``before_n`` is the Markov heads' alone."""
        return hidden_nD


# --------------------------------------------------------------------------------------------------------- peagle stage
# P-EAGLE as a block drafter: rows at depth 0 are the context, and a block begins with one.


class PeagleStage(BlockStage):
    """A P-EAGLE module over slots.

    As in EAGLE-3, a row at position p holds token p and the states of token p - 1, and is rotated by p - 1; the text's
    first token follows nothing, and no row sees it. The context are the rows of committed tokens, which go through all
    layers once. A block begins with the first token whose own states are not known: its row is at depth 0. The rows
    behind it have no states:

        token    c1  c2  c3 | r0   a   b   M   M       b is asked about, two tokens below the root
        states   s0  s1  s2 | s3   m   m   m   m       the row of b says what follows it, those of M what comes further
    """

    def _add_context(self, view: BatchView, rows: np.ndarray) -> None:
        parents = view.parents[rows]
        known = self.store.has(parents, self.nodes_in(parents))
        # A row that lacks its states is no context. The first token has no row at all, and no other one waits for it.
        self._context_of[view.slots[rows[~known & (parents >= 0)]]] = 0
        if known.any():
            part = subset(view, rows[known])
            part = replace(part, views=[self._sees(one) for one in part.views])
            self._compute(part, self._features(parents[known]))

    def _sees(self, view: RequestView) -> RequestView:
        """The view of rows of the context, which see context alone, and not the first token."""
        return replace(view, mask=view.mask & self._is_context(view.slots) & (view.positions > 0))

    def _block(self, view: BatchView, row: int) -> Block:
        block = super()._block(view, row)
        seen = block.context_positions > 0
        return replace(block, context=block.context[seen], context_positions=block.context_positions[seen])

    def _states(self, blocks: Sequence[Block], batch: BatchView) -> Tensor:
        feature_ND = self.module.masked().to(self.dtype).repeat(len(batch), 1)
        before = np.array([block.before for block in blocks])
        known = self.store.has(before, self.nodes_in(before))
        if known.any():
            firsts = np.cumsum([0, *(block.rows for block in blocks)])[:-1]
            feature_ND[torch.from_numpy(firsts[known])] = self._features(before[known])
        return self._compute(batch, feature_ND)

    def _features(self, slots: np.ndarray) -> Tensor:
        """The features [n, D] of rows whose parents are in these slots."""
        return self.module.fuse(self.store.states(slots)).to(self.dtype)

    def _compute(self, batch: BatchView, feature_ND: Tensor) -> Tensor:
        """Compute a batch's rows, and store their keys and values. Returns their states [N, D], normed."""
        tokens_N, positions_N = (torch.from_numpy(one).to(self.device) for one in (batch.tokens, batch.positions - 1))
        attend = BlockAttention(self.module.shape, batch, self.attention)
        hidden_ND: Tensor = self.module(tokens_N, feature_ND, positions_N, attend)
        return hidden_ND


# -------------------------------------------------------------------------------------------------------- peagle format
# The configurations of vLLM, NeMo and vllm-project/speculators.

MASKED: Final = "mask_hidden"
"""The tensor that takes the place of the target's states."""
MASK_TOKENS: Final = ("pard_token", "ptd_token_id", "mask_token_id")
"""Fields that name the mask token: two of vLLM's, and that of NeMo and speculators."""
DEPTHS: Final = ("num_depths", "para_depths")
"""Fields that say how many rows a pass has: NeMo's, and that of speculators' first version."""
PROPOSED: Final = "speculative_tokens"
"""The field in speculators' ``proposal_methods`` that says the same."""
USUAL_DEPTHS: Final = 8
"""Rows of a pass where the configuration does not say: what speculators' trainer has unless it is set."""
WRAPPED: Final = "model."
"""The beginning that NeMo puts before most tensors' names."""
BIASED: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
"""Projections that have a bias where ``attention_bias`` is set, as in Llama."""
USUAL: Final = {"norm_before_residual": False, "norm_output": False}
"""Values of EAGLE-3's fields where they are left out. In vLLM, too, these are P-EAGLE's."""


def _own_names(path: Path, tensors: Tensors) -> Tensors:
    """The tensors without ``WRAPPED`` before their names. Raises FieldError for two that have one name then."""
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        plain = name.removeprefix(WRAPPED).replace("layers.0.", "midlayer.")
        if plain in found:
            raise refusal(path, f"it holds both {found[plain].name} and {name}, which name the same tensor")
        found[plain] = stored
    return {name.removeprefix(WRAPPED): stored for name, stored in tensors.items()}


def _agreed(path: Path, config: Mapping[str, Any], names: Sequence[str], least: int) -> tuple[str, int] | None:
    """The first of these fields that is stated, and its number; None if none is. Raises FieldError if two differ."""
    stated = [(name, stated_integer(path, config, name, least=least)) for name in names if config.get(name) is not None]
    for name, number in stated:
        first, other = stated[0]
        if number != other:
            raise refusal(path, f"config.json: {name} is {number}, and {first} {other}; both mean the same")
    return stated[0] if stated else None


def _mask_token(path: Path, config: Mapping[str, Any], target: Checkpoint) -> int:
    stated = _agreed(path, config, MASK_TOKENS, least=0)
    if stated is None:
        raise refusal(path, f"config.json has none of {', '.join(MASK_TOKENS)}: one has to name the mask token")
    name, token = stated
    if token >= target.vocab_size:
        raise refusal(path, f"config.json: {name} is {token}; the target has {target.vocab_size} tokens")
    return token


def _rows(path: Path, config: Mapping[str, Any]) -> int:
    """The rows of a pass, of which a configuration may state the number in three places."""
    proposed = stated_integer(path, _proposal(path, config), PROPOSED, USUAL_DEPTHS)
    name, rows = _agreed(path, config, DEPTHS, least=1) or (PROPOSED, proposed)
    if rows > MOST_SCRATCH:
        raise refusal(path, f"config.json: {name} is {rows}; at most {MOST_SCRATCH} rows are computed at once")
    return rows


def _proposal(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of speculators' ``proposal_methods``; empty where there is none."""
    stated = config.get("speculators_config")
    if stated is None:
        return {}
    methods = stated.get("proposal_methods", []) if isinstance(stated, Mapping) else None
    if not isinstance(methods, list) or not all(isinstance(one, Mapping) for one in methods):
        raise refusal(
            path, f"config.json: speculators_config is {stated!r}; its proposal_methods have to be a list of tables"
        )
    return methods[0] if methods else {}


def _check_fields(path: Path, config: Mapping[str, Any], layers: Mapping[str, Any], depth: int, states: int) -> None:
    """Raise FieldError for a field that contradicts the file, or asks for a computation that is not supported."""
    if (kind := config.get(TYPE_FIELD)) not in (None, "peagle"):
        raise refusal(path, f"config.json: {TYPE_FIELD} is {kind!r}, but the drafter is P-EAGLE's: set it to 'peagle'")
    if stated_flag(path, config, "parallel_drafting") is False:
        raise refusal(path, "config.json: parallel_drafting is False, but the drafter is P-EAGLE's: remove the field")
    check_equal(
        path, "num_aux_hidden_states", config.get("num_aux_hidden_states"), states, "the states that it reads are"
    )
    kinds = layers.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * depth:
        raise refusal(path, f"config.json: layer_types is {kinds!r}; only 'full_attention' in all layers is supported")


def _further_shapes(
    path: Path, layers: Mapping[str, Any], layer: Any, depth: int, features: int, tensors: Tensors
) -> dict[str, Any]:
    """The tensors that are needed beside EAGLE-3's."""
    # vLLM's files hold it as [1, F], those of NeMo and speculators as [1, 1, F].
    axes = len(tensors[MASKED].shape) if MASKED in tensors else 2
    needed: dict[str, Any] = {MASKED: (1, 1, features) if axes == 3 else (1, features)}
    for i in range(1, depth):
        needed |= layer_shapes(f"layers.{i}", layer, layer.hidden_size)
        needed[f"layers.{i}.input_layernorm.weight"] = (layer.hidden_size,)
    found = {name.split(".")[-2] for name in tensors if ".self_attn." in name and name.endswith("_proj.bias")}
    stated = stated_flag(path, layers, "attention_bias")
    if stated is not None and stated != bool(found):
        raise refusal(path, f"config.json: attention_bias is {stated!r}, which the file's tensors contradict")
    # All layers are of one configuration: a projection that has a bias in one has a bias in all.
    biased = BIASED if stated else found
    for prefix in ("midlayer", *(f"layers.{i}" for i in range(1, depth))):
        shapes = bias_shapes(prefix, layer)
        needed |= {name: shape for name, shape in shapes.items() if name.split(".")[-2] in biased}
    return needed


@dataclass(frozen=True, kw_only=True)
class PeagleCheckpoint(Eagle3Checkpoint):
    """P-EAGLE; ``shape`` says how it drafts. Nothing follows from ``norm_output``: no row reads another's output."""

    stage = PeagleStage
    fields = Eagle3Checkpoint.fields | {
        *("parallel_drafting", "num_aux_hidden_states", "layer_types", *MASK_TOKENS, *DEPTHS),
        *("down_sample_ratio", "down_sample_ratio_min"),
    }

    kind: Kind = "peagle"
    shape: BlockShape

    @classmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        kind = block_kind(config)
        return kind == "peagle" or (kind is None and not tensors.keys().isdisjoint({MASKED, WRAPPED + MASKED}))

    @classmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
        config, tensors = flattened(path, config), _own_names(path, tensors)
        layers = config.get("transformer_layer_config", config)
        depth = 0

        def further(layer: Any, features: int) -> Shapes:
            nonlocal depth
            depth = stated_depth(path, layers, tensors)
            _check_fields(path, config, layers, depth, features // target.hidden_size)
            return _further_shapes(path, layers, layer, depth, features, tensors)

        stated = {**USUAL, **config} if config else config
        fields = eagle3_fields(path, stated, tensors, target, depth=None, further=further)
        shape = BlockShape(
            size=_rows(path, config),
            mask_token=_mask_token(path, config, target),
            from_anchor=True,
            causal=(True,) * depth,
            windows=(None,) * depth,
        )
        return cls(**fields, depth=depth, shape=shape)

    def build(self, material: Material) -> Peagle:
        embedding, head = material.embedding(), material.head()
        with torch.device("meta"):
            return Peagle(
                self.layer,
                self.shape,
                embedding,
                head,
                material.weights[MASKED].shape,
                biased=material.biased,
                norm_before_residual=self.norm_before_residual,
                norm_before_fc=self.norm_before_fc,
                normed_states=self.normed_states,
            )
