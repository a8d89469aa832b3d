"""A state comes back as it was, for the run that it belongs to and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.core import ConfigError
from penstock.lab.trainer.loop import Entry, State, load_state, save_state

SETTINGS = {"seed": 3, "learning_rate": 1e-3, "max_steps": None}


def test_it_comes_back(tmp_path: Path) -> None:
    history = [Entry(4, 0.5, ((0.1, 0.2), (0.05, 0.1))), Entry(8, 0.25, ((0.3, 0.4), (0.2, 0.3)), 1.5)]
    optimizer = {"state": {0: {"step": torch.tensor(8.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    state = State(SETTINGS, 8, {"fc.weight": torch.randn(3, 2)}, optimizer, history)
    save_state(state, tmp_path / "state.pt")
    found = load_state(tmp_path / "state.pt", SETTINGS)
    assert (found.step, found.history, found.settings) == (8, history, SETTINGS)
    assert torch.equal(found.weights["fc.weight"], state.weights["fc.weight"])
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_without_a_file_it_is_fresh(tmp_path: Path) -> None:
    assert load_state(tmp_path / "state.pt", SETTINGS) == State(SETTINGS)


def test_another_runs_is_refused(tmp_path: Path) -> None:
    save_state(State(SETTINGS, 8), tmp_path / "state.pt")
    with pytest.raises(ConfigError, match="holds a run with seed 3, not seed 4; use another folder, or --restart"):
        load_state(tmp_path / "state.pt", {**SETTINGS, "seed": 4})


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(b"PK nothing")
    with pytest.raises(ConfigError, match="is damaged; begin anew with --restart"):
        load_state(tmp_path / "state.pt", SETTINGS)
