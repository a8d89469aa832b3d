"""What has been measured, kept over runs: a file for each device with a model, for each link, and for each engine."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.cluster.measured import LayerTimes
from penstock.cluster.spec import Link
from penstock.core import ConfigError
from penstock.estimates.experience import Experience
from penstock.hosts.weights.cache import default_cache


class DeviceKey(msgspec.Struct, frozen=True, kw_only=True):
    """What layers' times depend on: a device, a model as it is held there, and the versions that compute."""

    host: str
    """As it is named, and ``node``: what it calls itself."""
    node: str
    device: str
    device_model: str
    threads: int
    model: str
    """The checkpoint's digest."""
    dtype: str
    quantization: str
    penstock: str
    torch: str


class LinkKey(msgspec.Struct, frozen=True, kw_only=True):
    """Two hosts by the names that ``node``, the engine's host, has for them, in order."""

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
    """What an engine's estimates depend on: a model's layers as stages hold them, their drafter, and the versions."""

    node: str
    """What the engine's host calls itself; ``hosts``: the stages', as they are named."""
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    threads: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    model: str
    """The checkpoint's digest."""
    dtype: str
    quantization: str
    speculation: str
    """Drafter and strategy with all their options."""
    penstock: str
    torch: str


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    key: EngineKey
    learned_at: float
    """Seconds since 1970."""
    experience: Experience


Kept = TypeVar("Kept", DeviceProfile, LinkProfile, EngineProfile)


def profiles_folder() -> Path:
    return default_cache().parent / "profiles"


class ProfileStore:
    """Files in ``folder``. One that is damaged counts as not there: what it held is measured again."""

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

    def keep(self, profile: DeviceProfile | LinkProfile | EngineProfile) -> None:
        """Raises ConfigError where it cannot be written."""
        place = self._place(profile.key)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = place.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(profile))
            new.replace(place)
        except OSError as error:
            raise ConfigError(f"{place}: cannot be written: {error.strerror}") from error

    def _read(self, key: Any, kind: type[Kept]) -> Kept | None:
        with contextlib.suppress(OSError, msgspec.DecodeError, ConfigError):
            found = msgspec.json.decode(self._place(key).read_bytes(), type=kind)
            return found if found.key == key else None
        return None

    def _place(self, key: Any) -> Path:
        return self._folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()}.json"
