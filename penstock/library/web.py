"""Pulls a GGUF file from an address that is not the hub's, into Penstock's cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.core import ConfigError
from penstock.files import cache_folder
from penstock.library.download import Download, check_space, fetch, one_line
from penstock.library.names import WebFile

MODELS: Final = "models"
"""The folder in Penstock's cache folder with a folder for each address."""
ADDRESS: Final = "address"
"""The file that says from which address a folder's model came."""
MAGIC: Final = b"GGUF"
ANSWER_S: Final = 10.0
"""Seconds in which the server has to say how large the file is."""


def place_of(file: WebFile) -> Path:
    """The file's place on this host: equal names at different addresses are different files."""
    return cache_folder() / MODELS / hashlib.sha256(file.url.encode()).hexdigest()[:16] / file.file


def pull(file: WebFile, announce: Callable[[int, Path], None]) -> Path:
    """Fetch the file, whose path is returned. Raises PenstockError, in one line, and ConfigError for no GGUF file."""
    place = place_of(file)
    with one_line(file.typed):
        download = Download(
            typed=file.typed,
            url=file.url,
            place=place,
            size=size_at(file.url),
            algorithm="sha256" if file.sha256 else "",
            checksum=file.sha256,
        )
        check_space(file.typed, [download], place.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        (place.parent / ADDRESS).write_text(file.url)
        announce(download.missing, place.parent)
        fetch(download)
    with place.open("rb") as content:
        begins = content.read(len(MAGIC))
    if begins != MAGIC:
        place.unlink()
        raise ConfigError(f"model: what {file.typed!r} answers is no GGUF file; give the address of the file itself")
    return place


def size_at(url: str) -> int | None:
    """The size in bytes that the server states, if it does."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    answer = get_session().head(url, follow_redirects=True, timeout=ANSWER_S)
    hf_raise_for_status(answer)
    stated = answer.headers.get("Content-Length", "")
    return int(stated) if stated.isdecimal() else None
