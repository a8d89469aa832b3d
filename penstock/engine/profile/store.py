"""Profiles on disk: a file for each device with a model, link, engine, and table of pieces."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from penstock.cluster import link_timings, stage_timings
from penstock.cluster.spec import LayerTimes, Link
from penstock.cluster.timing import BATCH_ROWS
from penstock.core import ConfigError
from penstock.engine.loop import EngineLoop
from penstock.engine.resolve import PrefillTimes, Resolved
from penstock.estimates.estimates import Experience
from penstock.files import cache_folder
from penstock.hosts.facts import HostFacts, own_facts, own_versions
from penstock.hosts.weights import files_of
from penstock.planner.costs import BLOCK, Ends, PieceTable

# ---------------------------------------------------------------------------------------------------------------- store
# Keeps measurements and plans over runs: a file for each device with a model, link, engine, and table of pieces.

log = logging.getLogger(__name__)

ELSEWHERE: Final = "XDG_CACHE_HOME names another folder for it"
"""The remedy where a profile cannot be written."""


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
    """The measured times of a model's layers on a device."""

    key: DeviceKey
    times: LayerTimes


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measured rate and latency of a link between two hosts."""

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
    """The experience of an engine, for the next one like it."""

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
    """The pieces of texts that were planned with the same times."""

    key: PiecesKey
    texts: list[Pieces]
    """Texts and their pieces, in the order in which they were last asked for."""


Profile = DeviceProfile | LinkProfile | EngineProfile | PiecesProfile
Kept = TypeVar("Kept", DeviceProfile, LinkProfile, EngineProfile, PiecesProfile)


def profiles_folder() -> Path:
    """The folder in which measured times of devices and links are kept."""
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
        """Write a profile. One that cannot be written is logged, a measurement as a warning: it is still of use now."""
        place = self._place(profile.key)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = place.with_suffix(f".{os.getpid()}.new")  # another engine may be writing its own
            new.write_bytes(msgspec.json.encode(profile))
            new.replace(place)  # at once, so that nobody reads half a file
        except OSError as error:
            level = logging.WARNING if isinstance(profile, DeviceProfile | LinkProfile) else logging.DEBUG
            log.log(
                level, "%s cannot be written (%s), so it is made again next time; %s", place, error.strerror, ELSEWHERE
            )

    def _read(self, key: Any, kind: type[Kept]) -> Kept | None:
        place = self._place(key)
        try:
            found = msgspec.json.decode(place.read_bytes(), type=kind)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            log.warning("%s cannot be read, so it counts as none: %s", place, error.strerror)
            return None
        except (msgspec.DecodeError, ConfigError) as error:
            log.warning("%s is damaged, and made anew: %s", place, error)
            return None
        return found if found.key == key else None

    def _place(self, key: Any) -> Path:
        return self._folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()}.json"


# --------------------------------------------------------------------------------------------------------------- digest
# Identifies a checkpoint within milliseconds, whatever its size.

PIECE: Final = 1 << 14
"""Bytes of one sample of a file."""
PIECES: Final = 64
"""Number of samples of a file, evenly spread over it, of ``PIECE`` bytes each: another training changes all of them.
Together they are one mebibyte."""


def digest_of(source: Path) -> str:
    """The digest of a checkpoint, a folder or a GGUF file, made of its files' names, sizes and samples of their bytes.

    It tells one training, quantisation or tokenizer from another, and proves nothing about bytes between the samples:
    weights that a host is to compute with are hashed whole (``hosts/weights.py``). Raises OSError for a file that
    cannot be read.
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


# --------------------------------------------------------------------------------------------------------------- memory
# Keeps the estimates that an engine has learned for the next one of its kind.

FORGET: Final = "PENSTOCK_FORGET"
"""The environment variable that, set to anything, has engines begin with nothing and keep nothing."""
HALF_LIFE_S: Final = 7 * 24 * 3600.0
"""Age in seconds at which learned values count half. After four weeks they are dropped (``LEAST``). Longer ones keep
what a host that has changed no longer does, shorter ones forget it between two uses."""
LEAST: Final = 1 / 16
"""Weight (0 to 1) below which learned values are dropped: four half-lives."""


def learned_folder() -> Path:
    """The folder in which engines keep what they have learned, one file for each key."""
    return cache_folder() / "learned"


class StoredExperience:
    """Has an engine begin with the estimates of the last one of its kind, and keeps those that it learns itself.

    It serves real stages only: the times of modelled ones are known.
    """

    def __init__(self, key: EngineKey, store: ProfileStore, loop: EngineLoop, now: float) -> None:
        """``now``: seconds since 1970."""
        self._key = key
        self._store = store
        self._loop = loop
        self._estimates = loop.estimates
        if (found := store.engine(key)) is not None:
            trust = 0.5 ** (max(0.0, now - found.learned_at) / HALF_LIFE_S)
            if trust >= LEAST:
                self._estimates.begin_with(found.experience, trust)

    @classmethod
    def of(cls, setup: Resolved, loop: EngineLoop) -> StoredExperience | None:
        """The memory for an engine; None where nothing is learned, or nothing is to be kept."""
        if os.environ.get(FORGET) or setup.speculation is None or not loop.estimates.trials.contended:
            return None
        return cls(engine_key(setup), ProfileStore(learned_folder()), loop, time.time())

    def keep(self) -> None:
        """Store the estimates, if any token has come since the start. Estimates for a measurement are not stored."""
        if not self._loop.tokens or self._loop.estimates is not self._estimates:
            return
        profile = EngineProfile(key=self._key, learned_at=time.time(), experience=self._estimates.experience)
        self._store.keep(profile)


def engine_key(setup: Resolved) -> EngineKey:
    """The key of an engine's experience: everything that its times and its drafter's hits depend on."""
    facts, hosts = own_facts(""), (*setup.hosts, "")  # the drafter is here
    return EngineKey(
        node=facts.name,
        hosts=setup.all_hosts,
        devices=setup.devices,
        device_models=tuple(
            "" if host else model_of(facts, one) for host, one in zip(hosts, setup.devices, strict=True)
        ),
        threads=setup.threads,
        layers=setup.layers,
        model=digest_of(setup.checkpoint.source),
        dtype=setup.options.dtype,
        quantization=setup.quantization,
        numerics=setup.options.numerics,
        speculation=repr(setup.speculation),
        penstock=facts.versions.penstock,
        torch=facts.versions.torch,
    )


def model_of(facts: HostFacts, device: str) -> str:
    """The model of a device of this host; empty for one that the driver does not list."""
    found = facts.device(device)
    return "" if found is None else found.model


# --------------------------------------------------------------------------------------------------------------- pieces
# Plans the pieces in which prompts enter, where the stages' times are known, and keeps them for the next engine.

MOST_RUNS: Final = 1024
"""Upper limit of the runs of equally long pieces in a file, about 10 kB. The texts that were asked for last stay."""


def pieces_folder() -> Path:
    """The folder in which planned pieces of prompts are kept."""
    return cache_folder() / "pieces"


class PlannedPieces:
    """A pipeline's table of pieces. It begins with those that earlier engines planned for a like pipeline."""

    def __init__(self, times: PrefillTimes, store: ProfileStore | None) -> None:
        """``store``: None where nothing is to be kept."""
        self._key = key_of(times)
        self._store = store
        kept = [] if store is None else store.pieces(self._key)
        known = {(one.tokens, one.cached): one.ends for one in kept if fits(one)}
        self.table = PieceTable(*times, known=known)

    @classmethod
    def of(cls, setup: Resolved) -> PlannedPieces | None:
        """The table for a setup; None where times of pieces are unknown, or ``prefill_chunk`` sets their length."""
        times = setup.prefill_times
        if setup.cluster is not None and setup.cluster.emulated:
            times = PrefillTimes(stage_timings(setup.cluster), link_timings(setup.cluster))
        if times is None or setup.options.prefill_chunk is not None:
            return None
        return cls(times, None if os.environ.get(FORGET) else ProfileStore(pieces_folder()))

    def keep(self) -> None:
        """Keep the table, if anything was added to it."""
        if self._store is None or not self.table.reckoned:
            return
        self._store.keep(PiecesProfile(key=self._key, texts=last_asked(self.table.known)))


def key_of(times: PrefillTimes) -> PiecesKey:
    """The key of the pieces that are planned with these times."""
    digest = hashlib.sha256(repr((tuple(times.stages), tuple(times.links))).encode()).hexdigest()
    return PiecesKey(times=digest, block=BLOCK, most=BATCH_ROWS, penstock=own_versions().penstock)


def fits(one: Pieces) -> bool:
    """Whether no piece is longer than a batch may be: the file's writer need not have been us."""
    return all(length <= BATCH_ROWS for length, _ in one.runs)


def last_asked(known: Mapping[tuple[int, int], Ends]) -> list[Pieces]:
    """The texts that were asked for last, as many as a file may hold, the latest one last."""
    found: list[Pieces] = []
    left = MOST_RUNS
    # From the end: ``PieceTable`` moves a text there whenever it is asked for.
    for (tokens, cached), ends in reversed([*known.items()]):
        lengths = [end - begin for begin, end in pairwise((cached, *ends))]
        runs = tuple((length, len(list(equal))) for length, equal in groupby(lengths))
        left -= len(runs)
        if left < 0:
            break
        found.append(Pieces(tokens, cached, runs))
    return found[::-1]
