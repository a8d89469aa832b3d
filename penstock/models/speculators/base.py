"""The base of learned drafters: checkpoints, tensors, shared layers, and the target's states that they read."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.look import INDEX_FILE, MEDUSA_FILE, SINGLE_FILE, is_read, shards_of, uses_index
from penstock.checkpoint.tensors import WEIGHT_TYPES, StoredTensor, Tensors, check_finite, stored_in
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, read_json, said, torch_dtype
from penstock.messages import Candidates, Features, SampledToken, Sampling
from penstock.models.attention import Arenas, Attend, Plan, SlotAttention, fast_attention
from penstock.models.linear import weight_bytes
from penstock.models.loader import load_module
from penstock.models.stage_model import NormOnly
from penstock.stage.grammar import GrammarMasks
from penstock.stage.sampler import contexts_of, rank_candidates
from penstock.stage.visibility import BatchView, FeaturesError

# ------------------------------------------------------------------------------------------------------------- features
# The target's hidden states in a learned drafter: stored by slot, each with the node that it belongs to.


class FeatureStore:
    """States of the target's layers ``reads``, each ``width`` wide, for ``capacity`` slots.

    Slots are the target's, and reused: a state counts only for the node that it came with. A drafter for a target with
    few layers may read one of them twice; it is sent and stored once.
    """

    def __init__(self, reads: Sequence[int], capacity: int, width: int, dtype: torch.dtype, device: str) -> None:
        # A layer that is read twice has one place; ``_places`` repeats it in the order of reading.
        self.layers = list(dict.fromkeys(reads))
        self._width = width
        self._places = torch.tensor([self.layers.index(layer) for layer in reads], device=device)
        self._states_SLD = torch.zeros(capacity, len(self.layers), width, dtype=dtype, device=device)
        # The node whose state each slot holds, by layer; 0 for none, since nodes are numbered from 1.
        self._owner_LS = np.zeros((len(self.layers), capacity), dtype=np.int64)
        self._nodes: list[set[int]] = [set() for _ in self.layers]

    def forget(self) -> None:
        """Forget all states."""
        self._states_SLD.zero_()
        self._owner_LS[:] = 0
        for known in self._nodes:
            known.clear()

    def add_features(self, features: Features, states: Tensor | None) -> None:
        """Store what a stage of the target has sent; ``states`` is [rows, layers x width], None without rows.

        Raises FeaturesError for layers, widths or slots that are not this drafter's.
        """
        if states is None:
            return
        width = states.shape[1]
        if not set(features.layers) <= set(self.layers) or width != len(features.layers) * self._width:
            raise FeaturesError(
                f"features of layers {features.layers}, {width} wide, came where {self.layers} of {self._width} each "
                "are read"
            )
        slots = np.asarray(features.slots, dtype=np.int64)
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(self._states_SLD):
            raise FeaturesError(f"features name a slot outside the {len(self._states_SLD)} of this drafter")
        for i, layer in enumerate(features.layers):
            place = self.layers.index(layer)
            self._states_SLD[torch.from_numpy(slots), place] = states[:, i * self._width : (i + 1) * self._width]
            # The nodes that held these slots before have lost their states.
            self._nodes[place].difference_update(self._owner_LS[place, slots].tolist())
            self._nodes[place].update(features.nodes)
            self._owner_LS[place, slots] = features.nodes

    def missing_features(self, nodes: set[int]) -> set[tuple[int, int]]:
        """The states of these nodes that have not arrived, as (node, layer)."""
        here = zip(self.layers, self._nodes, strict=True)
        return {(node, layer) for layer, known in here for node in nodes - known}

    def has(self, slots_N: np.ndarray, nodes_N: np.ndarray) -> np.ndarray:
        """Whether all states of each node are here, bool [N]; False for a slot below 0."""
        held: np.ndarray = (self._owner_LS[:, slots_N] == nodes_N).all(axis=0) & (slots_N >= 0)
        return held

    @property
    def width(self) -> int:
        """F, the width of all states that are read, side by side."""
        return self._width * len(self._places)

    def states(self, slots_N: np.ndarray) -> Tensor:
        """The states in these slots, side by side in the order in which they are read, [N, F]."""
        return self._states_SLD[torch.from_numpy(slots_N)][:, self._places].flatten(1)

    def partial(self, slots_N: np.ndarray, nodes_N: np.ndarray) -> Tensor:
        """The states of these nodes, [N, F], which hold these slots; zeros for those that have not arrived."""
        other_LN = torch.from_numpy(self._owner_LS[:, slots_N] != nodes_N).to(self._states_SLD.device)
        # Filled rather than multiplied by zero: what another node has left may be infinite.
        states_NLD = self._states_SLD[torch.from_numpy(slots_N)].masked_fill(other_LN.T[:, :, None], 0.0)
        return states_NLD[:, self._places].flatten(1)


# --------------------------------------------------------------------------------------------------------------- reader
# The parts of ``stage.driver.Layers`` that all kinds of learned drafters share.


class FeatureReader:
    """Part of ``stage.driver.Layers``, and all of ``Reader``; the module reads states of ``width`` numbers each."""

    grammars: GrammarMasks | None = None
    """Grammars over the target's tokenizer; None if no request can have one."""

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        self.module = module
        self.device = torch.device(device)
        self.dtype = torch_dtype(dtype)
        self.store = FeatureStore(reads, capacity, width, self.dtype, device)
        self._node_at = np.zeros(capacity, dtype=np.int64)

    @property
    def hidden_size(self) -> int:
        return int(self.module.hidden_size)

    @property
    def entering_width(self) -> int:
        return self.hidden_size

    @property
    def leaving_width(self) -> int:
        return self.hidden_size

    @property
    def kv_bytes(self) -> int:
        return 0

    @property
    def exact(self) -> bool:
        """False: a row's bits may depend on other rows, since drafts never change a token."""
        return False

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.module)

    def forget(self) -> None:
        """Forget all rows, features and requests, as after loading."""
        self.store.forget()
        self._node_at[:] = 0
        if self.grammars is not None:
            self.grammars.forget_all()

    def add_features(self, features: Features, states: Tensor | None) -> None:
        self.store.add_features(features, states)

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        return self.store.missing_features({node for node, _ in awaited})

    def pick(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[SampledToken]:
        raise ConfigError("a learned drafter picks no tokens; it gives candidates")

    def features(self, hidden: Tensor) -> Tensor:
        raise ConfigError("nobody reads a drafter's features")

    def register(self, view: BatchView) -> None:
        """Note that the rows of this batch now hold their slots."""
        self._node_at[view.slots] = view.nodes

    def nodes_in(self, slots_N: np.ndarray) -> np.ndarray:
        """The node that holds each slot, [N]; meaningless for a slot below 0."""
        nodes: np.ndarray = self._node_at[slots_N]
        return nodes


class AttendingReader(FeatureReader):
    """A reader whose module attends over slots, and gives logits after every row."""

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._arenas = Arenas(capacity)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the arenas; 0 before the first row."""
        return self._arenas.bytes

    def forget(self) -> None:
        super().forget()
        self._arenas.zero()

    def attention(self, view: BatchView) -> SlotAttention:
        """The attention for the module's calls for these rows."""
        return fast_attention(self._arenas, Plan(view, self.device, in_place=True), self.dtype)

    @torch.inference_mode()
    def candidates(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """``count`` noise-ranked candidates after each row in ``wanted``."""
        # The token after a row stands one position behind it, which is what the noise goes by.
        positions, nodes = view.positions[list(wanted)] + 1, view.nodes[list(wanted)]
        logits_nV = self.module.logits(hidden[list(wanted)])
        contexts = contexts_of(view, wanted, samplings, self.grammars)
        return rank_candidates(logits_nV, samplings, positions.tolist(), nodes.tolist(), count, contexts)


# -------------------------------------------------------------------------------------------------------------- weights
# Tensors in files: names, types and shapes first, contents when needed. Opens only safetensors.

SUFFIX: Final = ".safetensors"
REMEDY: Final = (
    "a pickle (.bin, .pt) is never opened: its tensors have to be saved as safetensors once, as "
    "docs/reference/drafters.md shows"
)


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, for every tensor of the speculator in a file or folder. Raises ConfigError if there are none."""
    return {stored.name: stored for file in _files(path) for stored in stored_in(file)}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != SUFFIX:
            raise ConfigError(f"{path.name} is no safetensors file; {REMEDY}")
        return [path]
    if (path / MEDUSA_FILE).is_file():
        return [path / MEDUSA_FILE]
    if uses_index(path):
        stated = read_json(path / CONFIG_FILE)
        return shards_of(path, lambda name: is_read(stated, name))
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    raise ConfigError(f"it holds none of {SINGLE_FILE}, {INDEX_FILE}, {MEDUSA_FILE}; {REMEDY}")


# ----------------------------------------------------------------------------------------------------------------- base
# A learned drafter's checkpoint: described before its tensors are read, then built and loaded; errors that refuse one.

FIELD: Final = "speculative_config.model"

IGNORED: Final = (
    "rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "t2d",
)
"""Ends of tensors' names that may be in a file though nothing is computed with them."""

MAPS: Final = ("d2t", "token_map")
"""Tensors that hold the target's token ids; all others are weights."""
MAP_TYPES: Final = ("I32", "I64")
"""Types of numbers that such a map may have, under the files' names."""

Kind = Literal[
    "eagle", "eagle3", "medusa", "mtp", "spd", "early_exit", "dflash", "dspark", "headrace", "jetspec", "peagle"
]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class SpeculatorCheckpoint(ABC):
    """A learned drafter that fits its target; every shape has been checked. Each kind is a class, named in ``open``.

    ``reads`` are the hidden states of the target that it needs, in transformers' numbering: 0 the embedding, k the
    output of layer k - 1, and the number of layers the states after the final norm; one more is the same before the
    norm. ``hidden_size`` is the width of its own states, ``draft_vocab_size`` the number of tokens that it can draft.

    ``tensors`` says where each tensor is stored, under the names of the kind's module. ``layer`` is the LlamaConfig of
    its layers, None where these are the target's or it has none; ``depth`` is the number of decoder layers that one
    pass goes through. ``stages`` is the only number of stages that it works with, None for any. ``draft_ids`` are the
    target's ids of the tokens that it can draft, where the configuration states them; None: all.
    """

    stage: ClassVar[type[FeatureReader]]
    """The class that answers with the module: ``Layers`` and ``Reader``."""
    fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of its configurations, beside a layer's, that are read or do not concern the computation."""
    lent: ClassVar[frozenset[str]] = frozenset({"embed_tokens.weight", "lm_head.weight"})
    """Tensors that the target lends where the file has none."""

    kind: Kind
    path: Path
    reads: tuple[int, ...]
    hidden_size: int
    draft_vocab_size: int
    tensors: Tensors
    layer: Any = None
    depth: int = 1
    stages: int | None = None
    draft_ids: tuple[int, ...] | None = None

    @classmethod
    @abstractmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        """Whether files with this configuration and these tensors hold a drafter of this kind."""

    @classmethod
    @abstractmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
        """Check what the files at ``path`` hold. Raises FieldError if it does not fit ``target``."""

    @abstractmethod
    def build(self, material: Material) -> nn.Module:
        """The kind's module; weights of its own may still be on the meta device."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The values of ``speculative_config.method`` that fit it."""
        return (self.kind,)

    @property
    def own_tensors(self) -> Tensors:
        """The tensors that are read into the built module, each under its parameter's name."""
        return self.tensors

    def load(self, target: Checkpoint, dtype: str, device: str) -> Any:
        """The module, with weights in ``dtype`` on ``device``, without gradients.

        Raises ConfigError for an unknown dtype, or ids of tokens that the target does not have.
        """
        torch_format = torch_dtype(dtype)
        stored = {name: one.read() for name, one in self.own_tensors.items()}
        # Maps are token ids, no weights: they must not be rounded to ``dtype``.
        vocabulary = DraftVocabulary(self._target_ids(target, stored), target.vocab_size)
        weights = {name: tensor.to(torch_format) for name, tensor in stored.items() if name not in MAPS}
        self._check_finite(weights)
        module = self.build(Material(weights, vocabulary, target, dtype, device))
        # Not strict: what the file lacks has come from the target. Shapes and names were checked when it was opened.
        module.load_state_dict(weights, strict=False, assign=True)
        return module.to(device).requires_grad_(False)

    def check_values(self, target: Checkpoint) -> None:
        """Raise FieldError if its map names tokens that the target does not have, or its vectors hold NaN."""
        stored = {name: one.read() for name, one in self.tensors.items() if name in MAPS or len(one.shape) == 1}
        self._target_ids(target, stored)
        self._check_finite(stored)

    def _check_finite(self, stored: Mapping[str, Tensor]) -> None:
        """Raise FieldError naming the first of these tensors that holds NaN or infinity."""
        try:
            check_finite(str(self.path), stored.items())
        except ConfigError as error:
            raise refusal(self.path, str(error).removeprefix(f"model: {self.path}: ")) from error

    def _target_ids(self, target: Checkpoint, stored: Mapping[str, Tensor]) -> Tensor | None:
        """The target's id of each token that can be drafted, [v]; None if these are all of the target's, in order."""
        if self.draft_ids is not None:
            return torch.tensor(self.draft_ids)
        if "token_map" in stored:
            name, ids_v = "token_map", stored["token_map"].long()
        elif "d2t" in stored:
            # EAGLE-3's d2t holds differences: draft token i is the target's i + d2t[i].
            name, ids_v = "d2t", stored["d2t"].long() + torch.arange(len(stored["d2t"]))
        else:
            return None
        strange = ids_v[(ids_v < 0) | (ids_v >= target.vocab_size)]
        if len(strange):
            raise refusal(self.path, f"{name} leads to token {int(strange[0])}; the target has {target.vocab_size}")
        if len(ids_v.unique()) < len(ids_v):
            raise refusal(self.path, f"{name} leads to one token of the target from two drafted ones")
        return ids_v


def refusal(path: Path, problem: str) -> FieldError:
    """The error that refuses the speculator at ``path``."""
    return FieldError(FIELD, f"is {str(path)!r}: {problem}")


def stated_integer(path: Path, config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """A field that has to be a whole number of at least ``least``. Raises FieldError for any other."""
    value = config.get(name, default)
    if type(value) is not int or value < least:
        raise refusal(path, f"config.json: {name} is {value!r}; it has to be an integer of {least} or more")
    return value


def stated_flag(path: Path, config: Mapping[str, Any], name: str) -> bool | None:
    """A field that has to be true, false or left out (None). Raises FieldError for any other."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise refusal(path, f"config.json: {name} is {value!r}; it has to be true or false")
    return value


def stated_depth(path: Path, layers: Mapping[str, Any], tensors: Tensors) -> int:
    """The number of layers, which cannot be above that of the file's tensors. Raises FieldError for any other."""
    depth = layers.get("num_hidden_layers")
    if type(depth) is not int or not 1 <= depth <= len(tensors):
        raise refusal(path, f"config.json: num_hidden_layers is {depth!r}; the file holds {len(tensors)} tensors")
    return depth


def check_equal(path: Path, name: str, own: Any, target: int, of_target: str) -> None:
    """Raise FieldError if the speculator states a size that differs from the target's; None states none."""
    if own is not None and own != target:
        raise refusal(path, f"{name} is {own}, {of_target} {target}: it was trained for another model")


def check_shapes(
    path: Path, tensors: Tensors, needed: Shapes, optional: Shapes, named: Callable[[str], str] = str
) -> dict[str, StoredTensor]:
    """The tensors that belong to the drafter. ``named`` gives the name by which files of this layout hold a tensor.

    Raises FieldError for a tensor that is missing, misshapen or unknown, and for a weight that is no float.
    """
    for name, shape in {**optional, **needed}.items():
        if name in tensors and tensors[name].shape != shape:
            stored = tensors[name]
            raise refusal(
                path, f"{stored.name} is {list(stored.shape)}; its configuration and the target ask for {list(shape)}"
            )
        if name in needed and name not in tensors:
            raise refusal(path, f"it lacks the tensor {named(name)} {list(shape)}: download or save it again")
    for name, stored in tensors.items():
        if name not in needed and name not in optional and not name.endswith(IGNORED):
            raise refusal(path, f"it holds the tensor {stored.name}, which no layout known here has")
    used = {name: stored for name, stored in tensors.items() if not name.endswith(IGNORED)}
    for name, stored in used.items():
        if name not in MAPS and stored.dtype not in WEIGHT_TYPES:
            wanted = ", ".join(sorted(WEIGHT_TYPES))
            raise refusal(path, f"{stored.name} is stored as {stored.dtype}; a weight has to be a float: {wanted}")
        if name in MAPS and stored.dtype not in MAP_TYPES:
            wanted = " or ".join(MAP_TYPES)
            raise refusal(path, f"{stored.name} is stored as {stored.dtype}; token ids have to be {wanted}")
    return used


def draft_vocabulary(path: Path, tensors: Tensors, name: str, size: int, target: Checkpoint) -> Shapes:
    """The shape of tensor ``name``, which maps a vocabulary of ``size`` to the target's; empty where both are the same.

    Raises FieldError if the drafter's vocabulary is larger than the target's.
    """
    if size > target.vocab_size:
        raise refusal(path, f"it drafts {size} tokens, the target knows {target.vocab_size}: it is another model's")
    return {name: (size,)} if size < target.vocab_size or name in tensors else {}


# ---------------------------------------------------------------------------------------------------------------- layer
# The parts of EAGLE's modules: one Llama layer over slots, and a vocabulary smaller than the target's.
#
# Shapes: N rows of a batch, n rows that ask for logits, D hidden size, I width of the attention's input, H query heads,
# K key heads, d width of a head, V the target's vocabulary, v the tokens that can be drafted.


MOST_PROBED: Final = 1024
"""The widest head for which a rotary embedding is made to see whether its configuration is sound."""


class Rotation(nn.Module):
    """Cosines and sines of the rows' positions, by transformers' own Llama embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # The frequencies come from the configuration, not from a file, so they cannot stay on the meta device until
        # loaded.
        with torch.device("cpu"):
            self.embedding = LlamaRotaryEmbedding(config)

    def forward(self, like_ND: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors [N, d], in the type of ``like_ND``."""
        cos, sin = self.embedding(like_ND, positions_N[None])
        return cos[0], sin[0]


def check_rotation(path: Path, config: Any) -> None:
    """Raise FieldError unless a layer's rotary embedding can be made of its configuration, for the whole of a head."""
    # The tensors have yet to confirm the head's width, which may be any number until then.
    probed, width = copy.copy(config), min(config.head_dim, MOST_PROBED)
    probed.head_dim = width
    try:
        turned = 2 * len(Rotation(probed).embedding.inv_freq)
    except Exception as error:
        raise refusal(path, f"its rotary fields, {config.rope_parameters!r}, cannot be used: {said(error)}") from error
    if turned != width:
        raise refusal(
            path,
            f"config.json: head_dim is {width}, of which its rotary embedding turns {turned}; it has to be even, and "
            "partial_rotary_factor 1 or left out",
        )


class Attention(nn.Module):
    """Llama's attention, whose input may be wider than the hidden size. ``biased`` names projections with a bias.

    If ``normed``, queries and keys are normed head by head, as in Qwen3.
    """

    def __init__(self, config: Any, width: int, biased: Collection[str], *, index: int, normed: bool) -> None:
        super().__init__()
        self.layer_idx = index
        self.head_dim: int = config.head_dim
        heads, key_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, heads, bias="q_proj" in biased)
        self.k_proj = nn.Linear(width, key_heads, bias="k_proj" in biased)
        self.v_proj = nn.Linear(width, key_heads, bias="v_proj" in biased)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias="o_proj" in biased)
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(self, entering_NI: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query_HNd, key_KNd, value_KNd = (
            projection(entering_NI).unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for projection in projections
        )
        query_HNd, key_KNd = self.q_norm(query_HNd), self.k_norm(key_KNd)
        # Heads come first here: cosines [N, d] get an axis for them in front.
        query_HNd, key_KNd = apply_rotary_pos_emb(query_HNd, key_KNd, *rotation, unsqueeze_dim=0)
        output_NHd = attend(self, query_HNd, key_KNd, value_KNd, None, scaling=self.head_dim**-0.5)
        return self.o_proj(output_NHd.flatten(1))


class DecoderLayer(nn.Module):
    """A Llama layer without a norm before attention: the attention's input and the residual are given apart."""

    def __init__(
        self, config: Any, width: int, biased: Collection[str], *, index: int = 0, normed: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, width, biased, index=index, normed=normed)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, entering_NI: Tensor, residual_ND: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        hidden_ND = residual_ND + self.self_attn(entering_NI, rotation, attend)
        return hidden_ND + self.mlp(self.post_attention_layernorm(hidden_ND))


class DraftVocabulary(nn.Module):
    """Maps logits over the tokens that can be drafted to the target's vocabulary.

    ``target_ids_v`` [v] int64 holds the target's id of each; None where the vocabularies are the same.
    """

    def __init__(self, target_ids_v: Tensor | None, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.target_ids_v = nn.Buffer(target_ids_v, persistent=False) if target_ids_v is not None else None

    def forward(self, logits_nv: Tensor) -> Tensor:
        """The logits over the target's vocabulary, float32 [n, V]; -inf for tokens that cannot be drafted."""
        logits_nv = logits_nv.float()
        if self.target_ids_v is None:
            return logits_nv
        # -inf and not absent: ranking adds noise by the target's token ids.
        logits_nV = logits_nv.new_full((len(logits_nv), self.vocab_size), -torch.inf)
        return logits_nV.index_copy_(1, self.target_ids_v, logits_nv)


# ------------------------------------------------------------------------------------------------------------- material
# The weights of a drafter's file, and the parts of its target that stand in for what the file lacks.


class TargetHead(nn.Module):
    """The target's own head, with its soft cap or scale, over states that have been normed already."""

    def __init__(self, target: Checkpoint, dtype: str, device: str) -> None:
        super().__init__()
        # Layers [n, n) of n: a last stage without layers, which has norm and head alone.
        causal = load_module(target, target.num_layers, target.num_layers, dtype, device)
        setattr(causal, target.parts.base, NormOnly(nn.Identity(), getattr(causal, target.parts.base)))
        self._causal = causal

    def forward(self, hidden_nD: Tensor) -> Tensor:
        """The logits, float32 [n, V]."""
        return self._causal(inputs_embeds=hidden_nD[None], use_cache=False).logits[0].float()


def final_norm(target: Checkpoint, dtype: str, device: str) -> nn.Module:
    """The target's final norm, frozen."""
    last = target.num_layers
    base = getattr(load_module(target, last, last, dtype, device), target.parts.base)
    norm: nn.Module = getattr(base, target.parts.norm)
    return norm.requires_grad_(False)


@dataclass(frozen=True)
class Material:
    """The parts of which a module is built: its own ``weights``, in ``dtype``, and the target's on ``device``."""

    weights: Mapping[str, Tensor]
    vocabulary: DraftVocabulary
    target: Checkpoint
    dtype: str
    device: str

    @property
    def biased(self) -> set[str]:
        """The projections of attention that have a bias."""
        names = (name for name in self.weights if ".self_attn." in name and name.endswith("_proj.bias"))
        return {name.split(".")[-2] for name in names}

    def embedding(self) -> nn.Embedding:
        """The drafter's own embedding, or the target's as stored, without a scale that the target applies."""
        weight = self.weights.get("embed_tokens.weight")
        if weight is None:
            base = getattr(load_module(self.target, 0, 0, self.dtype, self.device), self.target.parts.base)
            weight = getattr(base, self.target.parts.embed).weight.detach()
        return nn.Embedding.from_pretrained(weight)

    def head(self) -> nn.Module:
        """The drafter's own head, or the target's: states [n, D] to logits over the target's vocabulary [n, V]."""
        weight = self.weights.get("lm_head.weight")
        if weight is None:
            return TargetHead(self.target, self.dtype, self.device)
        with torch.device("meta"):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return nn.Sequential(linear, self.vocabulary)

    def norm(self) -> nn.Module:
        """The target's final norm."""
        return final_norm(self.target, self.dtype, self.device)
