"""Estimates are kept for engines of the same kind, lose weight with age, and are optional."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.engine.loop import EngineLoop
from penstock.engine.options import EngineOptions
from penstock.engine.profile.store import FORGET, HALF_LIFE_S, EngineKey, ProfileStore, StoredExperience, engine_key
from penstock.engine.resolve import Resolved, resolve_options
from penstock.estimates.estimates import Estimates
from penstock.messages import Span
from tests import drivers
from tests.drivers import install_driver

KEY = EngineKey(
    node="a",
    hosts=("",),
    devices=("cpu", "cpu"),
    device_models=("x86_64", "x86_64"),
    threads=(2, 2),
    layers=((0, 30),),
    model="0" * 64,
    dtype="float32",
    quantization="int4",
    numerics="auto",
    speculation="ngram",
    penstock="1",
    torch="2",
)
NOW = 1e9


def engine(tokens: int = 0) -> Any:
    """A loop with the two things that are read of it: its estimates and its number of tokens."""
    return SimpleNamespace(estimates=Estimates(contended=True, stages=1), tokens=tokens)


def remembering(store: ProfileStore, loop: Any, now: float = NOW, key: EngineKey = KEY) -> StoredExperience:
    return StoredExperience(key, store, cast(EngineLoop, loop), now)


def learn(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an engine that learns, and close it at NOW."""
    monkeypatch.setattr("penstock.engine.profile.store.time.time", lambda: NOW)
    loop = engine(tokens=1)
    memory = remembering(store, loop)
    loop.estimates.pipeline.record_spans([Span(0, 0.0, 0.0, 0.010, 0.0, 0.0, 1)])
    memory.keep()


def step_s(store: ProfileStore, **options: Any) -> float:
    """Return a new engine's estimate of a step with one row, in seconds; 0 if it has none."""
    loop = engine()
    remembering(store, loop, **options)
    return float(loop.estimates.pipeline.step_s(1))


def test_its_like_begins_with_it_until_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ProfileStore(tmp_path)
    assert step_s(store) == 0.0
    learn(store, monkeypatch)
    assert step_s(store) == pytest.approx(0.010)
    assert step_s(store, now=NOW + 3.9 * HALF_LIFE_S) == pytest.approx(0.010)
    assert step_s(store, now=NOW + 4.1 * HALF_LIFE_S) == 0.0
    (other,) = (EngineKey(**{name: getattr(KEY, name) for name in KEY.__struct_fields__} | {"quantization": "none"}),)
    assert step_s(store, key=other) == 0.0


def test_nothing_is_kept_of_an_engine_that_has_not_run_or_was_measured(tmp_path: Path) -> None:
    store, idle, measured = ProfileStore(tmp_path), engine(), engine(tokens=9)
    remembering(store, idle).keep()
    memory = remembering(store, measured)
    measured.estimates = measured.estimates.anew()
    memory.keep()
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remembering(ProfileStore(tmp_path / "file"), engine(tokens=1)).keep()


def test_modelled_stages_plain_decoding_and_whoever_wants_it_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = SimpleNamespace(estimates=Estimates(), tokens=0)
    drafting, plain = SimpleNamespace(speculation="ngram"), SimpleNamespace(speculation=None)
    assert StoredExperience.of(cast(Resolved, drafting), engine()) is None, "conftest.py has set it"
    monkeypatch.delenv(FORGET)
    assert StoredExperience.of(cast(Resolved, drafting), cast(EngineLoop, modelled)) is None
    assert StoredExperience.of(cast(Resolved, plain), engine()) is None


def test_another_model_of_gpu_is_another_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    keys = [engine_key(resolve_options(EngineOptions(device=f"cuda:{number}"))) for number in (0, 2)]
    assert [key.device_models for key in keys] == [
        ("NVIDIA GeForce RTX 3090",) * 2,
        ("NVIDIA GeForce RTX 2080 SUPER",) * 2,
    ]
    install_driver(tmp_path, monkeypatch, drivers.NO_DRIVER, code=9)
    assert engine_key(resolve_options(EngineOptions(device="cuda:0"))).device_models == ("", "")
