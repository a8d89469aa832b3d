"""Slots take memory as they are used, and give it back when a stage forgets its rows."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from penstock.models.recurrent import LAZY, ZeroPages
from tests.checkpoints import make_checkpoint
from tests.staged import Staged

CAPACITY = 1 << 18
MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_they_are_zeros_of_that_kind_before_and_after(dtype: torch.dtype) -> None:
    pages = ZeroPages(torch.empty(0, dtype=dtype), 3, 5000, 7)
    place = pages.array.data_ptr()
    assert (pages.array.dtype, pages.array.shape) == (dtype, (3, 5000, 7))
    assert not pages.array.any()
    pages.array[1] = 5
    assert pages.array.sum() == 5 * 5000 * 7 or dtype in (torch.bfloat16, torch.float16)
    pages.clear()
    assert not pages.array.any()
    assert pages.array.data_ptr() == place


def test_nothing_of_no_width() -> None:
    pages = ZeroPages(torch.empty(0), 2, 100, 0)
    pages.clear()
    assert pages.array.shape == (2, 100, 0)


@pytest.mark.skipif(not LAZY, reason="this system gives no zeros for pages that are given up")
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_5"])
def test_a_stage_takes_what_its_texts_need(tmp_path: Path, name: str) -> None:
    checkpoint = make_checkpoint(tmp_path, name)
    before = resident()
    (model,) = Staged(checkpoint, 1, capacity=CAPACITY).models
    assert model.kv_bytes > 100 * MIB
    assert resident() - before < model.kv_bytes / 4


@pytest.mark.skipif(not LAZY, reason="as above")
def test_what_is_cleared_takes_none_any_more() -> None:
    pages = ZeroPages(torch.empty(0), CAPACITY, 128)
    before = resident()
    pages.array.fill_(1)
    assert resident() - before > 100 * MIB
    pages.clear()
    assert resident() - before < 20 * MIB
