"""Reading is counted, whatever kind of file it is from, and every tensor in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import tensors as reading
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.tensors import StoredTensor, counted
from penstock.models.loader import read_module
from tests.checkpoints import LAYERS, make_checkpoint
from tests.gguf_files import make_gguf

STORED = StoredTensor(Path("a file"), "stored", (3, 4), "F32", lambda index: torch.zeros(3, 4)[index])


@pytest.mark.parametrize("make", [make_checkpoint, make_gguf])
def test_a_stage_says_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setattr(reading, "SECONDS", 0.0)
    checkpoint = open_checkpoint(str(make(tmp_path)))
    told: list[tuple[int, int]] = []
    read_module(checkpoint, 0, 2, "float32", "cpu", lambda *words: told.append(words))
    own = [name for name in checkpoint.weights.names() if "layers." not in name or ".0." in name or ".1." in name]
    sizes = checkpoint.weights.sizes()
    assert told[-1] == (sum(sizes[name] for name in own),) * 2
    assert told == sorted(told)
    assert len(told) > LAYERS


def test_words_are_rare_but_the_last_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SECONDS", 3600.0)
    told: list[tuple[int, int]] = []
    with counted({str(i): STORED for i in range(9)}, lambda *words: told.append(words)) as tensors:
        for name in "01234":  # the others are not needed here
            assert tensors[name][...].shape == (3, 4)
    assert told == [(12, 108), (108, 108)]


def test_it_is_the_tensor_otherwise() -> None:
    with counted({"a": STORED}, lambda *_: None) as tensors:
        found = tensors["a"]
    assert replace(found, select=STORED.select) == STORED


def test_without_a_listener_nothing_is_counted() -> None:
    stored = {"a": STORED}
    with counted(stored, None) as tensors:
        assert tensors is stored
