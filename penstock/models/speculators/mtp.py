"""Multi-token prediction (MTP): the module, and its tensors in a target's checkpoint or in one of its own."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from penstock.checkpoint.architectures import carries, layer_types
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.tensors import StoredTensor, Tensors, Weights, layer_of
from penstock.config import FieldError
from penstock.models.attention import Attend, attending
from penstock.models.loader import EMBEDDING_FACTORS, PassThrough, load_module
from penstock.models.probe import LENGTH_DEPENDENT, rope_kinds
from penstock.models.speculators.base import Kind, Material, SpeculatorCheckpoint, check_shapes, refusal
from penstock.models.speculators.eagle import EagleStage

# ------------------------------------------------------------------------------------------------------------------ mtp
# Multi-token prediction (MTP): one more layer like the target's, over its last state and the next token's embedding.
#
# Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; ``MtpModel`` of transformers; vLLM's qwen3_next_mtp.py. Shapes as
# in base.py.

LAYER: Final = "layer."
"""The prefix of the layer's own tensors in ``SpeculatorCheckpoint.tensors``."""
FULL: Final = "full_attention"
"""The type of layers that attend to everything."""


class Mtp(nn.Module):
    """An MTP head.

    A row is a token and the feature of the token before it; the output predicts the token's own feature.

    A feature is the target's final hidden state after its norm, or the output of the row before. ``base`` comes from
    ``load_base``, and ``layer`` is the layer in it. The target's ``norm`` is copied three times, for weights of their
    own. ``head`` gives logits over the target's vocabulary.
    """

    def __init__(self, base: Any, layer: nn.Module, norm: nn.Module, embed_tokens: nn.Module, head: nn.Module) -> None:
        super().__init__()
        width: int = base.config.hidden_size
        self.hidden_size = width
        self.embed_tokens = embed_tokens
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta")
        self.layer = layer
        self.base = base
        self.head = head

    def fuse(self, features_NF: Tensor) -> Tensor:
        """The features [N, D] that rows take from the target's states [N, F]: here F = D, and they are the same."""
        return features_NF

    def forward(self, tokens_N: Tensor, feature_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The predicted features [N, D] of the rows' own tokens. ``attend`` stores keys and values: see ``Attend``."""
        embedding_ND = self.enorm(self.embed_tokens(tokens_N))
        hidden_ND = self.eh_proj(torch.cat([embedding_ND, self.hnorm(feature_ND)], dim=-1))
        with attending(attend):
            output = self.base(inputs_embeds=hidden_ND[None], position_ids=positions_N[None], use_cache=False)
        return self.norm(output.last_hidden_state[0])

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits of the token after each row, float32 [n, V], from the output of ``forward``."""
        return self.head(hidden_nD)


def place_of(target: Checkpoint) -> int | None:
    """The last of the target's layers with full attention: an MTP head's own layer has its form.

    It is None if there is none, or if layers pass on more than hidden states.
    """
    if carries(target.config):
        return None
    types = layer_types(target.config) or [FULL] * target.num_layers
    full = [place for place, kind in enumerate(types) if kind == FULL]
    return full[-1] if full else None


def tensors_of_layer(target: Checkpoint, place: int) -> dict[str, str]:
    """Name within the layer at ``place`` -> name in the target's checkpoint, for the layer's tensors."""
    names = [name for name in target.weights.names() if layer_of(name) == place]
    return {name.split(f"layers.{place}.", 1)[1]: name for name in names}


def load_base(target: Checkpoint, place: int, tensors: Tensors, dtype: str, device: str) -> Any:
    """The target's base model with only the layer at ``place``, made of ``tensors`` (by their names within the layer).

    Raises ConfigError for tensors that the layer lacks.
    """
    weights = _Swapped(target.weights, tensors_of_layer(target, place), tensors)
    causal = load_module(replace(target, weights=weights), place, place + 1, dtype, device)
    base = getattr(causal, target.parts.base)
    setattr(base, target.parts.embed, PassThrough())
    setattr(base, target.parts.norm, nn.Identity())
    # What enters is no embedding but the output of ``eh_proj``: nothing may scale it once more.
    for factor in EMBEDDING_FACTORS:
        if hasattr(base, factor):
            setattr(base, factor, 1.0)
    return base


class _Swapped(Weights):
    """``weights`` with one layer's tensors replaced, so that an MTP head's layer loads like the target's."""

    def __init__(self, weights: Weights, layer: Mapping[str, str], tensors: Tensors) -> None:
        """``layer`` maps names within the layer, as in ``tensors``, to names in the checkpoint."""
        some, name = next(iter(layer.items()))
        prefix = name.removesuffix(some)
        left_out = set(layer.values())
        self._weights = weights
        self._others = [name for name in weights.names() if name not in left_out]
        self._swapped = {f"{prefix}{inner}": stored for inner, stored in tensors.items()}

    @property
    def files(self) -> list[Path]:
        return self._weights.files

    def names(self) -> list[str]:
        return [*self._others, *self._swapped]

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        wanted = list(names)
        found = self._weights.slices([name for name in wanted if name not in self._swapped], files)
        return found | {name: self._swapped[name] for name in wanted if name in self._swapped}


# ----------------------------------------------------------------------------------------------------------- mtp format
# MTP heads in checkpoints: the tensors that belong to a head, and whether they fit the target.
#
# Qwen's (Qwen3-Next, Qwen3.5) are stored under ``mtp.``, DeepSeek-V3's and GLM's as one more layer behind the target's
# last.

log = logging.getLogger(__name__)

QWEN: Final = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "norm.weight",
}
"""Name in Qwen's files -> name in the module here."""
# Four digits at most: names may hold any number.
QWEN_LAYER: Final = re.compile(r"mtp\.layers\.(\d{1,4})\.(.+)")
BEHIND: Final = re.compile(r"model\.layers\.(\d{1,4})\.(.+)")
SHARED: Final = {"shared_head.norm.weight": "norm.weight"}
"""Name in DeepSeek-V3's and GLM's files -> name in the module here."""
OWN: Final = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Tensors of a head beside its layer."""
COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and head, which are used instead: DeepSeek-V3's head shares them."""
EXPERTS: Final = ".experts."
"""Marks the tensors of experts, which are stored in several forms; the loader checks them."""


def no_head(target: Checkpoint) -> FieldError:
    """The error that refuses a target without an MTP head."""
    return FieldError(
        "speculative_config.method",
        f"is 'mtp', but {str(target.path)!r} ships no MTP head: it holds neither mtp.* nor a layer behind its "
        f"{target.num_layers}; train one (penstock train mtp) and name its folder as model, or take another method",
    )


def _of_head(path: Path, tensors: Tensors, layers: int) -> dict[str, StoredTensor]:
    """The tensors of the first head, under the names of the module here."""
    found, heads = {}, set()
    for name, stored in tensors.items():
        head, ours = _renamed(name, layers)
        heads.add(head)
        if head == 0 and ours not in COPIES:
            found[ours] = stored
    if more := len(heads - {None}) - 1:
        log.warning("%s: of its %d MTP heads the first drafts at every depth", path, more + 1)
    return found


def _renamed(name: str, layers: int) -> tuple[int | None, str]:
    """The number of the head that a tensor belongs to, None if none, and its name there."""
    if name in QWEN:
        return 0, QWEN[name]
    if match := QWEN_LAYER.fullmatch(name):
        return int(match[1]), LAYER + match[2]
    match = BEHIND.fullmatch(name)
    if match is None or int(match[1]) < layers:
        return None, name
    inner = SHARED.get(match[2], match[2])
    return int(match[1]) - layers, inner if inner in (*OWN, *COPIES, "norm.weight") else LAYER + inner


def _layer_shapes(target: Checkpoint, place: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the layer needs, from the target's own layer, without parts that have experts."""
    own = tensors_of_layer(target, place)
    checked = without_experts(own)
    with contextlib.ExitStack() as files:
        slices = target.weights.slices([own[inner] for inner in checked], files)
        return {LAYER + inner: slices[own[inner]].shape for inner in checked}


def without_experts(names: Collection[str]) -> set[str]:
    """The names that belong to no part of a layer with experts."""
    routed = tuple({f"{name.split(EXPERTS)[0]}." for name in names if EXPERTS in name})
    return {name for name in names if not name.startswith(routed)}


# ------------------------------------------------------------------------------------------------------- mtp checkpoint
# A head in the target's own checkpoint, or apart from it.


@dataclass(frozen=True, kw_only=True)
class MtpCheckpoint(SpeculatorCheckpoint):
    """``place`` is the layer of the target that the head's own layer resembles, and through which it is loaded."""

    stage = EagleStage

    kind: Kind = "mtp"
    place: int

    @classmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        behind = f"model.layers.{target.num_layers}.eh_proj.weight"
        return behind in tensors or any(name.startswith("mtp.") for name in tensors)

    @classmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
        place = place_of(target)
        if place is None:
            raise refusal(path, "the target has no layer that attends to everything; a head's layer would be like it")
        if kinds := rope_kinds(target.config) & LENGTH_DEPENDENT:
            raise refusal(path, f"the target's {', '.join(kinds)} rope depends on the longest request: not supported")
        width = target.hidden_size
        needed: dict[str, Any] = {"eh_proj.weight": (width, 2 * width)}
        needed |= {f"{name}.weight": (width,) for name in ("enorm", "hnorm", "norm")}
        found = _of_head(path, tensors, target.num_layers)
        routed = {name: found[name].shape for name in found.keys() - without_experts(found)}
        return cls(
            path=path,
            reads=(target.num_layers,),
            hidden_size=width,
            draft_vocab_size=target.vocab_size,
            tensors=check_shapes(path, found, needed | _layer_shapes(target, place), routed),
            place=place,
        )

    @property
    def own_tensors(self) -> Tensors:
        return {name: one for name, one in self.tensors.items() if not name.startswith(LAYER)}

    def build(self, material: Material) -> Mtp:
        target, dtype, device = material.target, material.dtype, material.device
        embedding, head = material.embedding(), material.head()
        layer = {name.removeprefix(LAYER): one for name, one in self.tensors.items() if name.startswith(LAYER)}
        base = load_base(target, self.place, layer, dtype, device)
        return Mtp(base, getattr(base, target.parts.layers)[self.place], material.norm(), embedding, head)
