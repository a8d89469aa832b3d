"""Plans the pieces in which prompts enter, where the stages' times are known, and keeps them for the next engine."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

from penstock.cluster import link_timings, stage_timings
from penstock.cluster.memory import BATCH_ROWS
from penstock.core import ConfigError
from penstock.engine.profile.memory import FORGET
from penstock.engine.profile.store import Pieces, PiecesKey, PiecesProfile, ProfileStore
from penstock.engine.resolve import PrefillTimes, Resolved
from penstock.files import cache_folder
from penstock.hosts.facts import own_versions
from penstock.planner.pieces import BLOCK, Ends, PieceTable

log = logging.getLogger(__name__)

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
