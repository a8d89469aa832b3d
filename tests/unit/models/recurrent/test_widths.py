"""The size of a slot by the configuration is the size that a loaded stage has."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.profile.measure import carrying
from penstock.models.recurrent import row_size
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, RECURRENT, make_checkpoint

CAPACITY = 8


@pytest.mark.parametrize("architecture", RECURRENT)
def test_it_is_what_a_stage_holds(architecture: str, tmp_path: Path) -> None:
    stage = load_stage(str(make_checkpoint(tmp_path, architecture)), 0, LAYERS, capacity=CAPACITY)
    config = stage.checkpoint.config
    own = row_size(config).bytes(of_weights=4, of_state=4)
    assert stage._mixers.bytes == sum(carrying(config)) * own * (CAPACITY + 1)
