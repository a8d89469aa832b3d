"""Pieces of prompts are kept for the next engine over a like pipeline, and for no other."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster import link_timings, load_cluster, stage_timings
from penstock.engine.profile import store
from penstock.engine.profile.store import (
    FORGET,
    MOST_RUNS,
    Pieces,
    PlannedPieces,
    ProfileStore,
    last_asked,
    pieces_folder,
)
from penstock.engine.resolve import PrefillTimes, Resolved
from penstock.planner.costs import PieceTable

TEXTS = [(260, 0), (1000, 48), (17, 16), (3000, 0)]


def times_of(name: str, **changes: Any) -> PrefillTimes:
    cluster = load_cluster(name, **changes)
    return PrefillTimes(stage_timings(cluster), link_timings(cluster))


TIMES = times_of("jupiter-heterogeneous")


@pytest.fixture
def kept(tmp_path: Path) -> ProfileStore:
    """A store filled by an engine that was asked to split four texts."""
    store = ProfileStore(tmp_path)
    engine = PlannedPieces(TIMES, store)
    for text in TEXTS:
        engine.table.ends(*text)
    engine.keep()
    return store


def test_the_next_engine_reckons_nothing_that_was_asked_for(
    kept: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [PieceTable(*TIMES).ends(*text) for text in TEXTS]
    monkeypatch.setattr("penstock.planner.costs.best_ends", lambda *_: pytest.fail("it was to be read"))
    table = PlannedPieces(TIMES, kept).table
    assert [table.ends(*text) for text in TEXTS] == expected
    assert table.reckoned == 0


def test_other_prices_links_or_settings_begin_anew(kept: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PlannedPieces(TIMES, kept).table.known
    slower = PrefillTimes(TIMES.stages, times_of("jupiter-heterogeneous", time_scale=2.0).links)
    for other in (times_of("jupiter-homogeneous"), slower, PrefillTimes(TIMES.stages[::-1], TIMES.links)):
        assert not PlannedPieces(other, kept).table.known
    monkeypatch.setattr(store, "BLOCK", 32)
    assert not PlannedPieces(TIMES, kept).table.known


def test_a_damaged_file_is_a_line_in_the_log_and_a_new_table(
    kept: ProfileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    assert b"[17,16,[[1,1]]]" not in whole, "lengths are whole blocks"
    for damaged in (b"", whole[:-9], whole.replace(b"[1008,48,", b"[1024,48,"), whole.replace(b"[[", b"[[-1,1],[")):
        file.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engine = PlannedPieces(TIMES, kept)
        assert not engine.table.known
        assert "damaged, and made anew" in caplog.text
        engine.table.ends(260)
        engine.keep()
        assert [*PlannedPieces(TIMES, kept).table.known] == [(272, 0)]


def test_pieces_longer_than_a_batch_are_not_believed(kept: ProfileStore, tmp_path: Path) -> None:
    (file,) = tmp_path.iterdir()
    engine = PlannedPieces(TIMES, kept)
    file.write_bytes(file.read_bytes().replace(b'"texts":[', b'"texts":[[4096,0,[[4096,1]]],'))
    assert (4096, 0) not in PlannedPieces(TIMES, kept).table.known
    assert len(PlannedPieces(TIMES, kept).table.known) == len(engine.table.known)


def test_a_file_stays_small_and_keeps_what_was_asked_for_last() -> None:
    table = PieceTable(*TIMES, known={(16 * n, 0): (16 * n,) for n in range(1, 3000)})
    table.ends(16)
    found = last_asked(table.known)
    assert len(found) == MOST_RUNS
    assert found[-1] == Pieces(16, 0, ((16, 1),))
    assert found[0].tokens == 16 * (3000 - MOST_RUNS + 1)


def test_a_table_forgets_what_was_asked_for_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.planner.costs.REMEMBERED", 2)
    table = PieceTable(*TIMES)
    for tokens in (16, 32, 16, 48):
        table.ends(tokens)
    assert [*table.known] == [(16, 0), (48, 0)]


def test_where_nothing_can_be_written_nothing_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = PlannedPieces(TIMES, ProfileStore(tmp_path / "file"))
    engine.table.ends(260)
    engine.keep()


def test_it_is_for_pipelines_whose_times_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def of(times: PrefillTimes | None, chunk: int | None = None) -> PlannedPieces | None:
        setup = SimpleNamespace(cluster=None, prefill_times=times, options=SimpleNamespace(prefill_chunk=chunk))
        return PlannedPieces.of(cast(Resolved, setup))

    assert of(None) is None
    assert of(TIMES, chunk=64) is None
    for kept_as in (0, 1):  # conftest.py has set FORGET
        found = of(TIMES)
        assert found is not None
        found.table.ends(260)
        found.keep()
        assert pieces_folder() == tmp_path / "penstock" / "pieces"
        assert len([*pieces_folder().glob("*.json")]) == kept_as
        monkeypatch.delenv(FORGET, raising=False)
