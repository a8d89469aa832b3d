"""The kinds of learned drafters: which one a checkpoint is of, and its module as a stage."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import LlamaConfig

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.look import GGUF, resolve
from penstock.checkpoint.tensors import Tensors
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import check_folder, read_json
from penstock.models.packing import pack
from penstock.models.speculators.base import FeatureReader, SpeculatorCheckpoint, find_tensors, refusal
from penstock.models.speculators.block_format import BlockCheckpoint
from penstock.models.speculators.block_gguf import parse_gguf
from penstock.models.speculators.eagle import Eagle3Checkpoint, EagleCheckpoint
from penstock.models.speculators.medusa import MedusaCheckpoint
from penstock.models.speculators.mtp import MtpCheckpoint, no_head
from penstock.models.speculators.peagle import PeagleCheckpoint
from penstock.models.speculators.spd import SpdCheckpoint
from penstock.models.stage_model import grammars_of

log = logging.getLogger(__name__)

KINDS: Final[tuple[type[SpeculatorCheckpoint], ...]] = (
    PeagleCheckpoint,
    BlockCheckpoint,
    MtpCheckpoint,
    Eagle3Checkpoint,
    MedusaCheckpoint,
    SpdCheckpoint,
    EagleCheckpoint,
)
"""All kinds, asked in this order: a configuration that names a kind counts before any tensor's name."""

OWN_NOTES: Final = ("_", "trained_with_")
"""Beginnings of fields in which libraries and Penstock's own training leave notes."""
COMMON: Final = frozenset(
    {
        *("architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("rope_theta", "rope_scaling", "base_model_name_or_path", "base_model_path", "has_no_defaults_at_init"),
    }
)
"""Fields of any kind's configuration that are read or do not concern the computation."""


def open_speculator(path: str, target: Checkpoint) -> SpeculatorCheckpoint:
    """Read everything but the weights of the speculator ``path`` (folder, file or hub id), for drafting for ``target``.

    Raises FieldError naming the tensor or field that is missing, unknown, not supported or made for another model.
    """
    with _named(path):
        place = Path(path).expanduser()
        place = place if place.is_file() else resolve(path)
        if place.suffix == GGUF:
            return parse_gguf(place, target)
        check_folder(place.parent if place.is_file() else place)
        tensors = find_tensors(place)
        config = read_json((place.parent if place.is_file() else place) / "config.json")
    kind = _kind(place, config, tensors, target)
    if kind is not MtpCheckpoint:  # an MTP head's configuration is the target's
        name_unknown(place, config, kind)
    return kind.parse(place, config, tensors, target)


def name_unknown(path: Path, config: Mapping[str, Any], kind: type[SpeculatorCheckpoint]) -> None:
    """Warn of fields in a drafter's configuration that are not read: drafts may be worse without them, tokens never."""
    known = LlamaConfig().to_dict().keys() | COMMON | kind.fields
    if unknown := sorted(name for name in config if name not in known and not name.startswith(OWN_NOTES)):
        log.warning("%s: config.json holds %s, which is not known here and not followed", path, ", ".join(unknown))


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Turn errors about the files into ones about the field that names them."""
    try:
        yield
    except FieldError:
        raise
    except ConfigError as error:
        raise refusal(Path(path), str(error).removeprefix("model: ")) from error


def _kind(path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> type[SpeculatorCheckpoint]:
    # A target's own checkpoint can hold an MTP head beside its layers, and no other drafter.
    own = path == target.path
    for kind in (MtpCheckpoint,) if own else KINDS:
        if kind.recognises(config, tensors, target):
            return kind
    if own:
        raise no_head(target)
    some = ", ".join(sorted(tensors)[:3])
    raise refusal(
        path,
        "it is no EAGLE, EAGLE-3, P-EAGLE, Medusa, MTP, SPD, DFlash, DSpark or Headrace checkpoint; its tensors are "
        f"{some}, ...; "
        "a small model of its own drafts with method 'draft_model'",
    )


def load_speculator_stage(
    path: str, target: str, *, capacity: int, dtype: str, device: str, quantization: str = "none"
) -> FeatureReader:
    """The learned drafter in folder (or hub id) ``path`` for the model in ``target``, with ``capacity`` slots.

    ``quantization`` is "none" or a format of ``packing.QUANTIZED``. Raises ConfigError if the two do not belong
    together.
    """
    model = open_checkpoint(target)
    checkpoint = open_speculator(path, model)
    module = checkpoint.load(model, dtype, device)
    pack(module, quantization)
    stage = checkpoint.stage(module, checkpoint.reads, model.hidden_size, capacity, dtype, device)
    stage.grammars = grammars_of(model)
    return stage
