"""A random target of a few layers, with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.models.checkpoint import Checkpoint, open_checkpoint
from tests.checkpoints import make_checkpoint
from tests.training import LAYERS


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The models are tiny: handing them to a second thread costs more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder, "llama", num_hidden_layers=LAYERS, tokenizer=True)


@pytest.fixture(scope="package")
def target(model: Path) -> Checkpoint:
    return open_checkpoint(str(model))
