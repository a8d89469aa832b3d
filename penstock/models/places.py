"""Finds a checkpoint: a folder, a GGUF file, or the hub's cache. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, NAMED_PIPE, is_named_pipe, read_json
from penstock.models.text_part import is_read
from penstock.models.weight_files import INDEX_FILE, MEDUSA_FILE, SINGLE_FILE, shards_of

SMALL: Final = ["*.json", "*.model", "*.jinja", "*.txt"]
"""Files that are fetched before the weights: configuration, tokenizer, chat template, index."""
GGUF: Final = ".gguf"


def resolve(model: str, revision: str | None = None) -> Path:
    """The path of a checkpoint: a local folder or GGUF file, or the folder of a hub id, from the cache or downloaded.

    Only the files that Penstock reads are downloaded.

    Raises ConfigError, which says what to do, if it is in none of these places.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if is_named_pipe(folder):
        raise ConfigError(f"model: {model!r} {NAMED_PIPE}")
    if folder.suffix == GGUF:
        if not folder.is_file():
            raise ConfigError(f"model: there is no file {model!r}")
        return folder
    if folder.is_file():
        raise ConfigError(f"model: {model!r} is a file; give a checkpoint's folder, or a file ending in {GGUF}")
    if folder.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ConfigError(
            f"model: there is no folder {model!r}; give a checkpoint's folder, a {GGUF} file or an id like "
            "'Qwen/Qwen3-0.6B'"
        )
    described = _described(model, revision)
    return described if has_weights(described) else _download(model, described.name, weights_of(described))


def weights_of(described: Path) -> list[str]:
    """Names of a repository's weight files, from its small files. Raises ConfigError for a wrong index.

    Many repositories hold the same weights twice, for another library, and multimodal ones those of their towers.
    """
    if not (described / INDEX_FILE).is_file():
        return [SINGLE_FILE, MEDUSA_FILE]
    stated = read_json(described / CONFIG_FILE)
    return [file.name for file in shards_of(described, lambda name: is_read(stated, name))]


def has_weights(described: Path) -> bool:
    """Whether the weights are there: all files that an index names, or one of those that need no index."""
    if (described / SINGLE_FILE).is_file():
        return True
    there = [(described / name).is_file() for name in weights_of(described)]
    return all(there) if (described / INDEX_FILE).is_file() else any(there)


def _described(model: str, revision: str | None) -> Path:
    """The folder of a repository at a commit, with its small files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=SMALL, local_files_only=True))
    except LocalEntryNotFoundError:
        return _download(model, revision, SMALL)
    except HFValidationError as error:
        raise ConfigError(f"model: {model!r} is neither a folder nor a valid hub id ({error})") from error


def _download(model: str, revision: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except Exception as error:
        raise ConfigError(
            f"model: {model!r} is not in the local hub cache and could not be downloaded ({error}). Check the name, "
            "the network and, for a gated model, `hf auth login`; or download it elsewhere and give the folder's path"
        ) from error
