"""A checkpoint on disk or on the hub: its configuration, its defaults, its shards, and how to split its layers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig

from penstock.core import ConfigError
from penstock.models.gate import Parts, check_supported

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
DOWNLOADED: Final = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Checkpoint:
    """A supported checkpoint. ``shards`` maps every tensor's name to the file that holds it.

    ``sampling_defaults`` are the sampling parameters of its generation_config; ``eos_token_ids`` end a text.
    """

    path: Path
    config: Any
    parts: Parts
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    def even_split(self, stages: int) -> list[tuple[int, int]]:
        """Split the layers evenly by parameters, the head counting for the last stage; see ``even_split``."""
        sizes = tensor_sizes(self.path)
        layers = sum(size for name, size in sizes.items() if layer_of(name) is not None)
        head = self.vocab_size * self.hidden_size
        return even_split(self.num_layers, stages, head_layers=head * self.num_layers / max(layers, 1))


def resolve(model: str, revision: str | None = None, also: Sequence[str] = ()) -> Path:
    """The folder of a checkpoint: a local one, or a hub id from the cache, or else downloaded.

    ``also`` are patterns of files that are wanted beside the usual ones. Raises ConfigError saying what to do when it
    is in none of these places.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.count("/") > 1:
        raise ConfigError(
            f"model: there is no folder {model!r}; give a checkpoint's folder or an id like 'Qwen/Qwen3-0.6B'"
        )
    wanted = [*DOWNLOADED, *also]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        return _download(model, revision, wanted)
    except HFValidationError as error:
        raise ConfigError(f"model: {model!r} is neither a folder nor a valid hub id ({error})") from error


def _download(model: str, revision: str | None, wanted: list[str]) -> Path:
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except Exception as error:
        raise ConfigError(
            f"model: {model!r} is not in the local hub cache and could not be downloaded ({error}). Check the name, "
            "the network and, for a gated model, `hf auth login`; or download it elsewhere and give the folder's path"
        ) from error


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Read everything but the weights. Raises ConfigError for what is missing, unreadable or not supported."""
    path = resolve(model, revision)
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {path} holds no config.json, so it is no Hugging Face checkpoint")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"model: config.json of {model!r} cannot be used: {error}") from error
    parts = check_supported(config)
    generation = read_json(path / "generation_config.json")
    return Checkpoint(path, config, parts, _eos_ids(config, generation), _sampling_defaults(generation))


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {file.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model: {file.name} holds no JSON object")
    return content


def _eos_ids(config: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    found = getattr(config, "eos_token_id", None) if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """The checkpoint's recommended sampling, as SamplingParams names it; ``do_sample`` false means greedy."""
    named = {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:  # greedy, which the penalty is for as well
        return {"temperature": 0.0} | {name: named[name] for name in named.keys() & {"repetition_penalty"}}
    return named


def shards(path: Path) -> dict[str, Path]:
    """The file of every tensor. Raises ConfigError if the checkpoint has no safetensors or lacks a shard."""
    if (path / INDEX_FILE).is_file():
        weight_map = read_json(path / INDEX_FILE).get("weight_map", {})
        return {name: path / file for name, file in weight_map.items()}
    single = path / SINGLE_FILE
    if not single.is_file():
        if any(path.glob("*.bin")):
            raise ConfigError(
                "model: the checkpoint has .bin weights only, which would have to be unpickled; convert it to "
                "safetensors: load it once with transformers and call save_pretrained"
            )
        raise ConfigError(f"model: neither {SINGLE_FILE} nor {INDEX_FILE} in {path}")
    with open_shard(single) as file:
        return dict.fromkeys(file.keys(), single)


def open_shard(file: Path) -> Any:
    """Open one safetensors file for lazy reading. Raises ConfigError if it is missing or damaged."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ConfigError(f"model: shard {file.name} is missing from {file.parent}: download it again") from error
    except Exception as error:
        raise ConfigError(f"model: {file.name} cannot be read ({error}): download it again") from error


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor of the checkpoint belongs to; None for embedding, norm and head."""
    parts = name.split(".")
    for before, part in itertools.pairwise(parts):
        if before == "layers" and part.isdigit():
            return int(part)
    return None


def tensor_sizes(path: Path) -> dict[str, int]:
    """The number of elements of every tensor of the checkpoint, from the shards' headers."""
    by_file: dict[Path, list[str]] = {}
    for name, file in shards(path).items():
        by_file.setdefault(file, []).append(name)
    sizes = {}
    for file, names in by_file.items():
        with open_shard(file) as opened:
            for name in names:
                size = 1
                for extent in opened.get_slice(name).get_shape():
                    size *= extent
                sizes[name] = size
    return sizes


def even_split(num_layers: int, stages: int, head_layers: float = 1.0) -> list[tuple[int, int]]:
    """Split ``num_layers`` into ``stages`` ranges [first, last) of nearly equal work.

    The last stage also holds the head, which weighs as much as ``head_layers`` layers. Stages get no layer only where
    there are too few, or where the head alone outweighs a fair share.
    """
    if stages < 1:
        raise ConfigError(f"pipeline_parallel_size is {stages}; it has to be at least 1")
    fair = (num_layers + head_layers) / stages
    last = num_layers if stages == 1 else min(num_layers, max(0, round(fair - head_layers)))
    last = max(last, min(1, num_layers // stages))
    counts = [last]
    for left in range(stages - 1, 0, -1):
        counts.insert(0, (num_layers - sum(counts)) // left)
    return _ranges(counts)


def parse_layer_split(text: str, num_layers: int) -> list[tuple[int, int]]:
    """Read a split like "4,6,6": the number of layers of each stage. Raises ConfigError unless it adds up."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"layer_split is {text!r}; it has to be numbers of layers like '4,6,6'") from None
    if any(count < 0 for count in counts):
        raise ConfigError(f"layer_split is {text!r}; a stage cannot hold a negative number of layers")
    if sum(counts) != num_layers:
        raise ConfigError(f"layer_split {text!r} adds up to {sum(counts)} layers; the model has {num_layers}")
    return _ranges(counts)


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return list(zip([0, *ends[:-1]], ends, strict=True))
