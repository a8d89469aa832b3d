"""Finds the files of a folder that hold its weights, without opening any."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.core import ConfigError
from penstock.files import check_inside, problem_in, read_json, shown

log = logging.getLogger(__name__)

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
MEDUSA_FILE: Final = "medusa_lm_head.safetensors"
"""Medusa's heads may be stored beside the model that they belong to."""
ADAPTER_FILE: Final = "adapter_config.json"
REFUSED: Final = {
    "*.bin": (
        "has .bin weights only, which would have to be unpickled; convert it to safetensors: load it once with "
        "transformers and call save_pretrained"
    ),
    "**/*.onnx": "holds a model for ONNX Runtime, which cannot be split; give the safetensors that it was made of",
}
"""Pattern of files that a folder without safetensors may hold -> what to tell the user."""


def uses_index(path: Path) -> bool:
    """Whether the index says where the weights are. A single file beside it takes precedence, as in transformers."""
    return (path / INDEX_FILE).is_file() and not (path / SINGLE_FILE).is_file()


def warn_of_two(path: Path) -> None:
    """Warn if an index beside a single file names other files."""
    if not ((path / INDEX_FILE).is_file() and (path / SINGLE_FILE).is_file()):
        return
    try:
        named = sorted({file.name for file in indexed(path).values()})
    except ConfigError as error:
        named = [str(error)]
    if named != [SINGLE_FILE]:
        log.warning(
            f"{path} holds {SINGLE_FILE}, and {INDEX_FILE} names {', '.join(named[:3])}: {SINGLE_FILE} is taken, as "
            "transformers does; remove what is stale"
        )


def check_weights(path: Path) -> None:
    """Raise ConfigError unless the folder holds safetensors, saying what else it holds."""
    if (path / INDEX_FILE).is_file() or (path / SINGLE_FILE).is_file():
        return
    check_no_adapter(path)
    for files, reason in REFUSED.items():
        if any(path.glob(files)):
            raise ConfigError(f"model: {path} {reason}")
    raise ConfigError(f"model: neither {SINGLE_FILE} nor {INDEX_FILE} in {path}")


def check_no_adapter(path: Path) -> None:
    """Raise ConfigError for the folder of an adapter, which is no model by itself."""
    if (path / ADAPTER_FILE).is_file():
        base = read_json(path / ADAPTER_FILE).get("base_model_name_or_path")
        raise ConfigError(
            f"model: {path} is an adapter (LoRA) for {shown(base)}; merge it into that model once: load it with peft, "
            "call merge_and_unload and save_pretrained, and give the folder that comes of it"
        )


def check_complete(path: Path, wanted: Callable[[str], bool]) -> None:
    """Raise ConfigError if a file is missing that the index names for a ``wanted`` tensor."""
    if not uses_index(path):
        return
    for file in shards_of(path, wanted):
        if not file.is_file():
            raise missing_shard(file)


def missing_shard(file: Path) -> ConfigError:
    return ConfigError(f"model: shard {file.name} is missing from {file.parent}: download it again")


def shards_of(path: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The files that hold a ``wanted`` tensor by the index, in order. Raises ConfigError like ``indexed``."""
    return sorted({file for name, file in indexed(path).items() if wanted(name)})


def indexed(path: Path) -> dict[str, Path]:
    """Tensor -> file, by the index. Raises ConfigError for a file outside of the folder."""
    index = path / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise problem_in(index, "weight_map", f"is {shown(weight_map)}; it has to lead from tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or file != Path(file).name:
            raise problem_in(
                index, f"weight_map.{name}", f"is {shown(file)}; it has to be a safetensors file in the same folder"
            )
    files = {file: path / file for file in set(weight_map.values())}
    for file in files.values():
        check_inside(path, file)
    return {name: files[file] for name, file in weight_map.items()}
