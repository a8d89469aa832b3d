"""Profiles on disk: a file for each device with a model, link, engine, and table of pieces."""

from __future__ import annotations

import hashlib
import logging
import os
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from penstock.cluster.spec import LayerTimes, Link
from penstock.core import ConfigError
from penstock.estimates.drafts import Experience
from penstock.files import cache_folder
from penstock.hosts.weights import files_of

# ---------------------------------------------------------------------------------------------------------------- store
# Keeps measurements and plans over runs: a file for each device with a model, link, engine, and table of pieces.

log = logging.getLogger(__name__)


class DeviceKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that layer times depend on: a device, a model as it is held there, and the versions that compute."""

    host: str
    """The host's name in the options; ``node`` is the name that it has for itself."""
    node: str
    device: str
    device_model: str
    threads: int
    model: str
    """The checkpoint's digest."""
    dtype: str
    quantization: str
    numerics: str
    penstock: str
    torch: str


class LinkKey(msgspec.Struct, frozen=True, kw_only=True):
    """Two hosts, in alphabetical order of the names that ``node``, the engine's host, has for them."""

    node: str
    ends: tuple[str, str]
    encrypted: bool


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    key: DeviceKey
    times: LayerTimes


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    key: LinkKey
    link: Link


class EngineKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine's estimates depend on: layers as stages hold them, the drafter, and the versions."""

    node: str
    """The engine's host, by its own name for itself; ``hosts`` are those of stages and their ranks, as plans name them.
    """
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    device_models: tuple[str, ...]
    """The models of this host's devices; empty for those of other hosts."""
    threads: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    model: str
    """The checkpoint's digest."""
    dtype: str
    quantization: str
    numerics: str
    speculation: str
    """Drafter and strategy with all their options."""
    penstock: str
    torch: str


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    key: EngineKey
    learned_at: float
    """Seconds since 1970."""
    experience: Experience


class PiecesKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a prompt's pieces depend on. Model, layer split and devices count only through their times."""

    times: str
    """A digest of the times of stages and links, with every digit."""
    block: int
    """Tokens that pieces are multiples of; ``most``: tokens of the longest piece."""
    most: int
    penstock: str


class Pieces(msgspec.Struct, frozen=True, array_like=True):
    """The cut of a text: its pieces after the cached part, in order, as ``runs`` of a length and its repeats."""

    tokens: int
    cached: int
    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Raises ValueError where the pieces are not the text's."""
        if self.cached < 0 or any(length < 1 or times < 1 for length, times in self.runs):
            raise ValueError("a length or a number of pieces is less than 1")
        if self.cached + sum(length * times for length, times in self.runs) != self.tokens:
            raise ValueError(f"the pieces do not add up to {self.tokens} tokens")

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of the text's tokens at which each piece ends."""
        lengths = [length for length, times in self.runs for _ in range(times)]
        return tuple(accumulate(lengths, initial=self.cached))[1:]


class PiecesProfile(msgspec.Struct, frozen=True, kw_only=True):
    key: PiecesKey
    texts: list[Pieces]
    """Texts and their pieces, in the order in which they were last asked for."""


Profile = DeviceProfile | LinkProfile | EngineProfile | PiecesProfile
Kept = TypeVar("Kept", DeviceProfile, LinkProfile, EngineProfile, PiecesProfile)


def profiles_folder() -> Path:
    return cache_folder() / "profiles"


class ProfileStore:
    """Profiles as files in ``folder``. A damaged file is logged and counts as missing: its content is made again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def times(self, key: DeviceKey) -> LayerTimes | None:
        found = self._read(key, DeviceProfile)
        return None if found is None else found.times

    def link(self, key: LinkKey) -> Link | None:
        found = self._read(key, LinkProfile)
        return None if found is None else found.link

    def engine(self, key: EngineKey) -> EngineProfile | None:
        return self._read(key, EngineProfile)

    def pieces(self, key: PiecesKey) -> list[Pieces]:
        found = self._read(key, PiecesProfile)
        return [] if found is None else found.texts

    def keep(self, profile: Profile) -> None:
        """Write a profile. Raises ConfigError if it cannot be written."""
        place = self._place(profile.key)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = place.with_suffix(f".{os.getpid()}.new")  # another engine may be writing its own
            new.write_bytes(msgspec.json.encode(profile))
            new.replace(place)  # at once, so that nobody reads half a file
        except OSError as error:
            raise ConfigError(f"{place}: cannot be written: {error.strerror}") from error

    def _read(self, key: Any, kind: type[Kept]) -> Kept | None:
        place = self._place(key)
        try:
            found = msgspec.json.decode(place.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, ConfigError) as error:
            log.warning("%s is damaged, and made anew: %s", place, error)
            return None
        return found if found.key == key else None

    def _place(self, key: Any) -> Path:
        return self._folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()}.json"


# --------------------------------------------------------------------------------------------------------------- digest
# Identifies a checkpoint within milliseconds, whatever its size.

PIECE: Final = 1 << 14
PIECES: Final = 64
"""Each file is sampled at ``PIECES`` evenly spread places, ``PIECE`` bytes each: other training changes all of them."""


def digest_of(source: Path) -> str:
    """The digest of a checkpoint, a folder or a GGUF file, made of its files' names, sizes and samples of their bytes.

    It tells one training, quantisation or tokenizer from another, and proves nothing about bytes between the samples:
    weights that a host is to compute with are hashed whole (``hosts/weights.py``). Raises OSError.
    """
    digest = hashlib.sha256()
    for file in files_of(source):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(sample(file))
    return digest.hexdigest()


def sample(file: Path) -> bytes:
    """The digest of samples of a file, its beginning and its end among them; a small file is hashed whole."""
    digest = hashlib.sha256()
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= PIECE * PIECES:
            digest.update(opened.read())
        else:
            for piece in range(PIECES):
                opened.seek((size - PIECE) * piece // (PIECES - 1))
                digest.update(opened.read(PIECE))
    return digest.digest()
