"""Rows that carry more than hidden states, over stages; integration/engine/test_unusual_layers.py has their ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.models.stage_model import load_stage
from tests.checkpoints import make_checkpoint
from tests.staged import Staged


def test_shared_keys_and_values_are_kept_once_a_stage(tmp_path: Path) -> None:
    """Seven layers, four of which read the second's and third's."""
    path = make_checkpoint(tmp_path, "gemma4_shared", seed=2)
    sliding, full = 96 * 2 * 2 * 16 * 4, 96 * 2 * 2 * 24 * 4
    assert [stage.kv_bytes for stage in Staged(path, 1).models] == [2 * sliding + full]
    assert [stage.kv_bytes for stage in Staged(path, 7).models] == [
        sliding,
        full,
        sliding,
        sliding,
        full,
        sliding,
        full,
    ]


def test_a_drafter_that_reads_one_state_of_a_layer_is_refused_where_there_are_several(tmp_path: Path) -> None:
    stage = load_stage(str(make_checkpoint(tmp_path, "gemma3n")), 0, 7, capacity=8)
    stage.tap([7, 8])
    with pytest.raises(ConfigError, match=r"'gemma3n_text' .*several hidden states"):
        stage.tap([3])
