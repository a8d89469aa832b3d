"""Where a checkpoint lies: a folder, a GGUF file, or the hub's cache. No torch is needed to find it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from penstock.core import ConfigError

DOWNLOADED: Final = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
GGUF: Final = ".gguf"


def resolve(model: str, revision: str | None = None) -> Path:
    """The place of a checkpoint: a local folder or GGUF file, or the folder of a hub id, from the cache or downloaded.

    Raises ConfigError saying what to do when it is in none of these places.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=DOWNLOADED, local_files_only=True))
    except LocalEntryNotFoundError:
        return _download(model, revision)
    except HFValidationError as error:
        raise ConfigError(f"model: {model!r} is neither a folder nor a valid hub id ({error})") from error


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=DOWNLOADED))
    except Exception as error:
        raise ConfigError(
            f"model: {model!r} is not in the local hub cache and could not be downloaded ({error}). Check the name, "
            "the network and, for a gated model, `hf auth login`; or download it elsewhere and give the folder's path"
        ) from error
