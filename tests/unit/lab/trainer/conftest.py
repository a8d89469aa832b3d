"""A random target of a few layers, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tests.checkpoints import make_checkpoint
from tests.training import LAYERS


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder, "llama", num_hidden_layers=LAYERS, tokenizer=True)


@pytest.fixture(scope="package")
def target(model: Path) -> Checkpoint:
    return open_checkpoint(str(model))
