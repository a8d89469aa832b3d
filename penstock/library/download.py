"""Fetches a file with huggingface_hub's own client, goes on with one that was broken off, and compares its checksum.

huggingface_hub throws away what it has of a file if the process ends. Here it stays, beside the place of the whole
file, and the next process goes on from there.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.filesize import decimal

from penstock.core import PenstockError
from penstock.files import said

PART: Final = ".penstock.incomplete"
"""Suffix of a file that is not yet whole."""
GIT_BLOB: Final = "git"
"""The checksum of git: SHA-1 of a header with the size, and the content."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file to fetch. ``typed`` is the model as the user wrote it, for errors."""

    typed: str
    url: str
    place: Path
    size: int | None = None
    """Bytes; None where the server does not say."""
    algorithm: str = ""
    """``sha256`` or ``git``; empty where nobody states a checksum."""
    checksum: str = ""

    @property
    def part(self) -> Path:
        return self.place.with_name(f"{self.place.name}{PART}")

    @property
    def there(self) -> int:
        """Bytes that have come already."""
        return next((file.stat().st_size for file in (self.place, self.part) if file.is_file()), 0)

    @property
    def missing(self) -> int:
        return max((self.size or 0) - self.there, 0)


def check_space(typed: str, downloads: Iterable[Download], folder: Path) -> None:
    """Raise PenstockError unless the disk of ``folder``, which need not exist, has room for what is missing."""
    needed = sum(one.missing for one in downloads)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise PenstockError(
            f"model: {typed!r} needs {decimal(needed)} in {folder}, where {decimal(free)} are free: free some space, "
            "as with penstock rm, or set HF_HOME to a folder on another disk"
        )


def fetch(download: Download, headers: Mapping[str, str] | None = None) -> None:
    """Fetch the file unless it is there. Raises PenstockError for a connection that ends early or another checksum."""
    from huggingface_hub.utils import WeakFileLock

    download.place.parent.mkdir(parents=True, exist_ok=True)
    lock = download.part.with_name(f"{download.part.name}.lock")
    with WeakFileLock(lock):  # another process may be fetching the same file
        if not download.place.is_file():
            receive(download, headers)
            check_sum(download)
            download.part.replace(download.place)
    lock.unlink(missing_ok=True)


def receive(download: Download, headers: Mapping[str, str] | None) -> None:
    """Fetch what is missing of the part. Raises PenstockError, with how much has come, where the connection ends."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get

    begun = download.there
    if download.size is None or begun > download.size:  # nobody can say whether that is the beginning of this file
        download.part.unlink(missing_ok=True)
        begun = 0
    try:
        with quiet_retries(), download.part.open("ab") as file:
            http_get(
                download.url,
                file,
                resume_size=begun,
                headers=dict(headers or {}),
                expected_size=download.size,
                displayed_filename=download.url.rpartition("/")[2],
            )
    except HfHubHTTPError:
        if not begun:
            download.part.unlink()
        raise
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        whole = "" if download.size is None else f" of {decimal(download.size)}"
        raise PenstockError(
            f"model: {download.typed!r}: the connection ended after {decimal(download.there)}{whole} "
            f"({said(error, 120)}): type the same again, and it goes on from there"
        ) from error


@contextmanager
def quiet_retries() -> Iterator[None]:
    """A context in which huggingface_hub tries again without a word: the error at the end says what came of it."""
    log = logging.getLogger("huggingface_hub.file_download")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def check_sum(download: Download) -> None:
    """Raise PenstockError, and remove what has come, unless the part has the checksum that was stated."""
    if not download.algorithm:
        return
    found = sum_of(download.part, download.algorithm)
    if found == download.checksum:
        return
    download.part.unlink()
    raise PenstockError(
        f"model: {download.typed!r}: {download.url.rpartition('/')[2]} came with the checksum {found[:12]}..., and "
        f"{download.checksum[:12]}... was stated: it has been removed; pull it again, and if that repeats, look for a "
        "proxy that changes files"
    )


def sum_of(file: Path, algorithm: str) -> str:
    """The checksum of a file in hexadecimal digits."""
    with file.open("rb") as content:
        if algorithm != GIT_BLOB:
            return hashlib.file_digest(content, algorithm).hexdigest()
        found = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
        while piece := content.read(1 << 20):
            found.update(piece)
        return found.hexdigest()
