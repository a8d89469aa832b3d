"""Which kind of drafter lies in a folder, told from its configuration and the names of its tensors, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, read_json, shown
from penstock.models.weight_files import MEDUSA_FILE

DRAFT_MODEL: Final = "draft_model"
MOST_HEADER: Final = 1 << 26
"""Bytes of a safetensors file's header."""
UNSUPPORTED: Final = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE", "hydra": "Hydra", "mlp": "MLP"}
"""What names of drafters' configurations hold that are not supported, and what they are called."""
NAMED_BY: Final = ("speculators_model_type", "model_type", "architectures", "algorithm")
MEDUSA: Final = re.compile(r"blocks\.\d+\.layers\.\d+\.weight|\d+\.\d+\.linear\.weight")


def method_of(model: str) -> str:
    """The method that drafts with a folder or file: a small model's where nothing says otherwise.

    Raises FieldError for drafters that are not supported, by their kind.
    """
    place = Path(model).expanduser()
    if place.is_file():
        place = place.parent if place.suffix == ".safetensors" else place
    if not place.is_dir():
        return DRAFT_MODEL
    try:
        config = read_json(place / CONFIG_FILE)
    except ConfigError:
        return DRAFT_MODEL  # which says what is wrong with it
    names = frozenset(name for file in sorted(place.glob("*.safetensors")) for name in tensor_names(file))
    found = learned(config, names, place)
    if found is None:
        refuse_unsupported(config, place)
    return found or DRAFT_MODEL


def learned(config: Mapping[str, Any], names: frozenset[str], place: Path) -> str | None:
    """The method of a learned drafter that is supported."""
    stated = config.get("speculator")
    if isinstance(stated, str):
        return stated
    if config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    alone = not any(name.startswith("model.") for name in names)
    if alone and ((place / MEDUSA_FILE).is_file() or any(MEDUSA.fullmatch(name) for name in names)):
        return "medusa"
    if any(name.startswith("spec_layers.") for name in names):
        return "spd"
    if alone and any(name.startswith("mtp.") for name in names):
        return "mtp"
    return "eagle" if alone and "fc.weight" in names and not any(unsupported_names(config)) else None


def refuse_unsupported(config: Mapping[str, Any], place: Path) -> None:
    """Raise FieldError for a drafter of a kind that is known and not supported."""
    for name, kind in unsupported_names(config):
        raise FieldError(
            "speculative_config.model",
            f"is {str(place)!r}, a drafter of kind {kind} ({shown(name)}), which is not supported; use another one, or "
            "prompt lookup (method 'ngram')",
        )


def unsupported_names(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stated: list[Any] = [config.get(field) for field in NAMED_BY]
    stated += [f"{key}" for key in config if key.endswith("_config")]
    for name in flat(stated):
        yield from ((name, kind) for word, kind in UNSUPPORTED.items() if re.match(word, name.lower()))


def flat(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))


def tensor_names(file: Path) -> list[str]:
    """The names in a safetensors file's header; none of a file that is damaged, which its reader says."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            return list(json.loads(opened.read(length))) if length <= MOST_HEADER else []
    except (OSError, ValueError, MemoryError, RecursionError):
        return []
