"""Downloads: resumed, checked by their sums, within the free space; and refusals in one line."""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.filesize import decimal

from penstock.core import ConfigError, PenstockError
from penstock.files import said
from penstock.library.names import hint

# ------------------------------------------------------------------------------------------------------------- download
# Fetches a file with huggingface_hub's own client, goes on with one that was broken off, and compares its checksum.
#
# huggingface_hub throws away what it has of a file if the process ends. Here it stays, beside the place of the whole
# file, and the next process goes on from there.

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


# ------------------------------------------------------------------------------------------------------------- refusals
# The errors between this host and the hub, each in one line that names what was typed and what to do.

ELSEWHERE: Final = "or download it elsewhere and give the path of its folder or file"


class Unreachable(PenstockError):
    """Nobody who has the model that was ``typed`` answers."""

    def __init__(self, message: str, typed: str = "") -> None:
        super().__init__(message)
        self.typed = typed


@contextmanager
def one_line(typed: str) -> Iterator[None]:
    """Raise errors of the hub's client, the network and the disk as one line about the model that was ``typed``."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except PenstockError:
        raise
    except OfflineModeIsEnabled as error:
        words = f"model: {typed!r} is not on this host, and HF_HUB_OFFLINE is set: unset it{hint(typed)}"
        raise Unreachable(words, typed) from error
    except HFValidationError as error:
        raise ConfigError(
            f"model: {typed!r} is neither a place on this host nor a valid hub id: {said(error)}"
        ) from error
    except HfHubHTTPError as error:
        raise answered(typed, error) from error
    except (HTTPError, ConnectionError) as error:
        raise Unreachable(
            f"model: {typed!r} is not on this host, and its server does not answer ({said(error)}): check the network "
            f"and HF_ENDPOINT, {ELSEWHERE}{hint(typed)}",
            typed,
        ) from error
    except OSError as error:
        raise of_disk(typed, error) from error


def answered(typed: str, error: Any) -> PenstockError:
    """The error for an answer that refuses."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    if isinstance(error, GatedRepoError):
        return ConfigError(
            f"model: {typed!r} is gated: accept its licence on its page, then `hf auth login` or set HF_TOKEN"
        )
    if status == 404 and "://" in typed:
        return ConfigError(f"model: there is nothing at {typed!r} (status 404): check the address")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return ConfigError(
            f"model: the hub has no {typed!r}, or shows it to nobody without a token: check the name, and for a "
            f"private model `hf auth login`{hint(typed)}"
        )
    if status in (401, 403):
        return ConfigError(
            f"model: the hub refuses {typed!r} to this token (status {status}): `hf auth login` with one that may "
            "read it"
        )
    return Unreachable(
        f"model: {typed!r} is not on this host, and its server answers with status {status}: try again later, "
        f"{ELSEWHERE}",
        typed,
    )


def of_disk(typed: str, error: OSError) -> PenstockError:
    """The error for a file that cannot be written."""
    place = f" in {Path(str(error.filename)).parent}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return PenstockError(
            f"model: {typed!r} does not fit: the disk is full{place}; free some space, as with penstock rm, and pull "
            "it again: it goes on from there"
        )
    return PenstockError(
        f"model: {typed!r} cannot be kept{place}: {error.strerror or said(error)}; set HF_HOME, or XDG_CACHE_HOME for "
        "what is not the hub's, to a folder that can be written to"
    )
