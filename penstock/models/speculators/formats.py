"""Opens a learned drafter's checkpoint: recognises its layout by the files, and checks it against its target.

Only headers and configuration are read. The layouts: SafeAILab/EAGLE's for EAGLE-1 (cnets1) and EAGLE-3 (cnets),
vllm-project/speculators' for eagle3, FasterDecoding/Medusa's, vLLM's for Medusa,
yuyijiong/speculative_pipeline_decoding's for SPD, and MTP heads in a target's own checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import LlamaConfig

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import check_folder, read_json
from penstock.models.checkpoint import Checkpoint
from penstock.models.places import GGUF, resolve
from penstock.models.speculators.base import Kind, SpeculatorCheckpoint, refusal
from penstock.models.speculators.eagle_format import parse_eagle, parse_eagle3
from penstock.models.speculators.medusa_format import is_medusa, parse_medusa
from penstock.models.speculators.mtp_format import is_mtp, no_head, parse_mtp
from penstock.models.speculators.spd_format import is_spd, parse_spd
from penstock.models.speculators.weights import Stored, find_tensors

log = logging.getLogger(__name__)

__all__ = ["SpeculatorCheckpoint", "open_speculator"]

PARSERS: Final = {
    "eagle": parse_eagle,
    "eagle3": parse_eagle3,
    "medusa": parse_medusa,
    "mtp": parse_mtp,
    "spd": parse_spd,
}
OWN_NOTES: Final = ("_", "trained_with_")
"""Beginnings of fields in which libraries and Penstock's own training leave notes."""
READ: Final = frozenset(
    {
        *("architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version", "bias", "version"),
        *("rope_theta", "rope_scaling", "base_model_name_or_path", "base_model_path", "medusa_num_heads"),
        *(
            "num_heads",
            "num_layers",
            "medusa_num_layers",
            "truncated_vocab_size",
            "draft_vocab_size",
            "target_hidden_size",
            "eagle_config",
        ),
        *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        *("transformer_layer_config", "speculators_model_type", "speculators_version", "speculators_config"),
        *("speculator", "num_stages", "num_spec_layers", "num_aggr_types", "aggr_feature_bound", "draft_token_ids"),
        *("shallow_hidden_layer_indices", "post_state", "embed_requires_grad", "has_no_defaults_at_init"),
    }
)
"""Fields of drafters' configurations, beside a layer's, that are read or do not concern the computation."""
TYPE_FIELD: Final = "speculators_model_type"


def open_speculator(path: str, target: Checkpoint) -> SpeculatorCheckpoint:
    """Read everything but the weights of the speculator ``path`` (folder, file or hub id), for drafting for ``target``.

    Raises FieldError naming the tensor or field that is missing, unknown, not supported or made for another model.
    """
    with _named(path):
        place = Path(path).expanduser()
        place = place if place.is_file() else resolve(path)
        if place.suffix == GGUF:
            raise refusal(place, "learned drafters are read from safetensors, small models in GGUF by draft_model")
        check_folder(place.parent if place.is_file() else place)
        tensors = find_tensors(place)
        config = read_json((place.parent if place.is_file() else place) / "config.json")
    kind = _kind(place, config, tensors, target)
    if kind != "mtp":  # an MTP head's configuration is the target's
        name_unknown(place, config)
    return PARSERS[kind](place, config, tensors, target)


def name_unknown(path: Path, config: Mapping[str, Any]) -> None:
    """Warn of fields in a drafter's configuration that are not read: drafts may be worse without them, tokens never."""
    known = LlamaConfig().to_dict().keys() | READ
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


def _kind(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored], target: Checkpoint) -> Kind:
    if is_mtp(tensors, target):
        return "mtp"
    if path == target.path:
        raise no_head(target)
    stated = config.get(TYPE_FIELD)
    if stated is not None:
        if stated != "eagle3":
            raise refusal(path, f"config.json: {TYPE_FIELD} is {stated!r}; only 'eagle3' is supported so far")
        return "eagle3"
    if any(name.startswith("midlayer.") for name in tensors) or "layers.0.hidden_norm.weight" in tensors:
        return "eagle3"
    if is_medusa(tensors):
        return "medusa"
    if is_spd(config, tensors):
        return "spd"
    if "fc.weight" in tensors:
        return "eagle"
    some = ", ".join(sorted(tensors)[:3])
    raise refusal(
        path,
        f"it is no EAGLE, EAGLE-3, Medusa, MTP or SPD checkpoint; its tensors are {some}, ...; "
        "a small model of its own drafts with method 'draft_model'",
    )
