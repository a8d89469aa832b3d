"""MTP heads in checkpoints: the tensors that belong to a head, and whether they fit the target.

Qwen's (Qwen3-Next, Qwen3.5) are stored under ``mtp.``, DeepSeek-V3's and GLM's as one more layer behind the target's
last.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.config import FieldError
from penstock.models.checkpoint import Checkpoint
from penstock.models.rope import LENGTH_DEPENDENT, rope_kinds
from penstock.models.speculators.base import SpeculatorCheckpoint, check_shapes, refusal
from penstock.models.speculators.mtp import LAYER, place_of, tensors_of_layer
from penstock.models.speculators.weights import Stored

log = logging.getLogger(__name__)

QWEN: Final = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "norm.weight",
}
"""Name in Qwen's files -> name in the module here."""
QWEN_LAYER: Final = re.compile(r"mtp\.layers\.(\d{1,4})\.(.+)")
BEHIND: Final = re.compile(r"model\.layers\.(\d{1,4})\.(.+)")
SHARED: Final = {"shared_head.norm.weight": "norm.weight"}
OWN: Final = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and head, which are used instead: DeepSeek-V3's head shares them."""
EXPERTS: Final = ".experts."
"""Marks the tensors of experts, which are stored in several forms; the loader checks them."""

Tensors = Mapping[str, Stored]


def is_mtp(tensors: Tensors, target: Checkpoint) -> bool:
    return (
        any(name.startswith("mtp.") for name in tensors)
        or f"model.layers.{target.num_layers}.eh_proj.weight" in tensors
    )


def parse_mtp(path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> SpeculatorCheckpoint:
    """Parse a head in the target's own checkpoint, or apart from it.

    Raises FieldError if it does not fit ``target``.
    """
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
    used = check_shapes(path, found, needed | _layer_shapes(target, place), routed)
    return SpeculatorCheckpoint("mtp", path, (target.num_layers,), width, target.vocab_size, used, place=place)


def no_head(target: Checkpoint) -> FieldError:
    """The error that refuses a target without an MTP head."""
    return FieldError(
        "speculative_config.method",
        f"is 'mtp', but {str(target.path)!r} ships no MTP head: it holds neither mtp.* nor a layer behind its "
        f"{target.num_layers}; train one (penstock train mtp) and name its folder as model, or take another method",
    )


def _of_head(path: Path, tensors: Tensors, layers: int) -> dict[str, Stored]:
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
        return {LAYER + inner: tuple(slices[own[inner]].get_shape()) for inner in checked}


def without_experts(names: Collection[str]) -> set[str]:
    """The names that belong to no part of a layer with experts."""
    routed = tuple({f"{name.split(EXPERTS)[0]}." for name in names if EXPERTS in name})
    return {name for name in names if not name.startswith(routed)}
