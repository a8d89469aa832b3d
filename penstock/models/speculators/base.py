"""The description of a learned drafter's checkpoint before its tensors are read, and the errors that refuse one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from penstock.config import FieldError
from penstock.models.checkpoint import Checkpoint
from penstock.models.shards import WEIGHT_TYPES
from penstock.models.speculators.weights import Stored

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

Kind = Literal["eagle", "eagle3", "medusa", "mtp", "spd", "early_exit"]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SpeculatorCheckpoint:
    """A learned drafter that fits its target; every shape has been checked.

    ``reads`` are the hidden states of the target that it needs, in transformers' numbering: 0 the embedding, k the
    output of layer k - 1, and the number of layers the states after the final norm; one more is the same before the
    norm. ``hidden_size`` is the width of its own states, ``draft_vocab_size`` the number of tokens that it can draft.

    ``tensors`` says where each tensor is stored, under the names of the modules here; ``layer`` is the LlamaConfig of
    its layers, and ``layers`` their number (for Medusa: blocks in each of its ``heads``). ``levels`` are the states
    that SPD's module reads for a token, by how far the token has got; ``stages`` is the only number of stages that it
    works with, None for any; ``asking`` is the level of the rows that it is asked about. ``draft_ids`` are the target's
    ids of the tokens that it can draft, where the configuration states them; None: all. ``place`` is the layer of the
    target that an MTP head's own layer resembles.
    """

    kind: Kind
    path: Path
    reads: tuple[int, ...]
    hidden_size: int
    draft_vocab_size: int
    tensors: Mapping[str, Stored]
    layer: Any = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    heads: int = 0
    layers: int = 1
    levels: tuple[tuple[int, ...], ...] = ()
    stages: int | None = None
    asking: int = 0
    draft_ids: tuple[int, ...] | None = None
    place: int = 0

    @property
    def depth(self) -> int:
        """How many decoder layers one pass goes through."""
        return 0 if self.kind == "medusa" else self.layers


def refusal(path: Path, problem: str) -> FieldError:
    """The error that refuses the speculator at ``path``."""
    return FieldError(FIELD, f"is {str(path)!r}: {problem}")


def check_equal(path: Path, name: str, own: Any, target: int, of_target: str) -> None:
    """Raise FieldError if the speculator states a size that differs from the target's; None states none."""
    if own is not None and own != target:
        raise refusal(path, f"{name} is {own}, {of_target} {target}: it was trained for another model")


def check_shapes(path: Path, tensors: Mapping[str, Stored], needed: Shapes, optional: Shapes) -> dict[str, Stored]:
    """The tensors that belong to the drafter.

    Raises FieldError for a tensor that is missing, misshapen or unknown, and for a weight that is no float.
    """
    for name, shape in {**optional, **needed}.items():
        if name in tensors and tensors[name].shape != shape:
            stored = tensors[name]
            raise refusal(
                path, f"{stored.name} is {list(stored.shape)}; its configuration and the target ask for {list(shape)}"
            )
        if name in needed and name not in tensors:
            raise refusal(path, f"it lacks the tensor {name} {list(shape)}: download or save it again")
    for name, stored in tensors.items():
        if name not in needed and name not in optional and not name.endswith(IGNORED):
            raise refusal(path, f"it holds the tensor {stored.name}, which no layout known here has")
    used = {name: stored for name, stored in tensors.items() if not name.endswith(IGNORED)}
    for name, stored in used.items():
        if name not in MAPS and stored.dtype not in WEIGHT_TYPES:
            raise refusal(path, f"{stored.name} is stored as {stored.dtype}; a weight has to be a float")
    return used


def draft_vocabulary(path: Path, tensors: Mapping[str, Stored], name: str, size: int, target: Checkpoint) -> Shapes:
    """The shape of tensor ``name``, which maps a vocabulary of ``size`` to the target's; empty where both are the same.

    Raises FieldError if the drafter's vocabulary is larger than the target's.
    """
    if size > target.vocab_size:
        raise refusal(path, f"it drafts {size} tokens, the target knows {target.vocab_size}: it is another model's")
    return {name: (size,)} if size < target.vocab_size or name in tensors else {}
