"""Keeps the estimates that an engine has learned for the next one of its kind."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Final

from penstock.core import ConfigError
from penstock.engine.loop import EngineLoop
from penstock.engine.profile.digest import digest_of
from penstock.engine.profile.store import EngineKey, EngineProfile, ProfileStore
from penstock.engine.resolve import Resolved
from penstock.files import cache_folder
from penstock.hosts.facts import HostFacts, own_facts

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
        hosts=setup.hosts,
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
