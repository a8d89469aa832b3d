"""Experience of an engine, kept for the next one of its kind: estimates, and the pieces of prompts."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

from penstock.cluster import link_timings, stage_timings
from penstock.cluster.timing import BATCH_ROWS
from penstock.core import ConfigError
from penstock.engine.loop import EngineLoop
from penstock.engine.profile.store import (
    EngineKey,
    EngineProfile,
    Pieces,
    PiecesKey,
    PiecesProfile,
    ProfileStore,
    digest_of,
)
from penstock.engine.resolve import PrefillTimes, Resolved
from penstock.files import cache_folder
from penstock.hosts.facts import HostFacts, own_facts, own_versions
from penstock.planner.pieces import BLOCK, Ends, PieceTable

# --------------------------------------------------------------------------------------------------------------- memory
# Keeps the estimates that an engine has learned for the next one of its kind.

log = logging.getLogger(__name__)

FORGET: Final = "PENSTOCK_FORGET"
"""The environment variable that, set to anything, has engines begin with nothing and keep nothing."""
HALF_LIFE_S: Final = 7 * 24 * 3600.0
"""Age in seconds at which learned values count half."""
LEAST: Final = 1 / 16
"""Weight (0 to 1) below which learned values are dropped: four half-lives."""


def learned_folder() -> Path:
    return cache_folder() / "learned"


class Memory:
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
    def of(cls, setup: Resolved, loop: EngineLoop) -> Memory | None:
        """The memory for an engine; None where nothing is learned, or nothing is to be kept."""
        if os.environ.get(FORGET) or setup.speculation is None or not loop.estimates.trials.contended:
            return None
        return cls(engine_key(setup), ProfileStore(learned_folder()), loop, time.time())

    def keep(self) -> None:
        """Store the estimates, if any token has come since the start. Estimates for a measurement are not stored."""
        if not self._loop.tokens or self._loop.estimates is not self._estimates:
            return
        profile = EngineProfile(key=self._key, learned_at=time.time(), experience=self._estimates.experience)
        try:
            self._store.keep(profile)
        except ConfigError as error:
            log.debug("what was learned is not kept: %s", error)


def engine_key(setup: Resolved) -> EngineKey:
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
    found = facts.device(device)
    return "" if found is None else found.model


# --------------------------------------------------------------------------------------------------------------- pieces
# Plans the pieces in which prompts enter, where the stages' times are known, and keeps them for the next engine.

MOST_RUNS: Final = 1024
"""Most runs of equally long pieces in a file, about 10 kB. The texts that were asked for last stay."""


def pieces_folder() -> Path:
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
        try:
            self._store.keep(PiecesProfile(key=self._key, texts=last_asked(self.table.known)))
        except ConfigError as error:
            log.debug("pieces of prompts are not kept: %s", error)


def key_of(times: PrefillTimes) -> PiecesKey:
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
