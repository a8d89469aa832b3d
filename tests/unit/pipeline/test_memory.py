"""Memory that is freed while a stage loads goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Final

import numpy as np
import pytest

from penstock.pipeline.worker import returned_at_once

MEGABYTE: Final = 1 << 20
PIECES: Final = 64
FREED: Final = f"""
import ctypes
import numpy as np, psutil
from penstock.pipeline.worker import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, returned_at_once
# Pieces of this size are kept, as glibc learns to do from larger ones that are freed.
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, {16 * MEGABYTE})
ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, {32 * MEGABYTE})
with returned_at_once():
    freed, kept = [], []
    for _ in range({PIECES}):
        freed.append(np.ones({MEGABYTE}, np.uint8))
        kept.append(np.ones(100_000, np.uint8))
    before = psutil.Process().memory_info().rss
    freed.clear()
    print(before - psutil.Process().memory_info().rss)
"""
"""A process of its own has this to say: glibc fills the holes of a heap, which tests leave, before it asks for more."""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_what_is_freed_between_what_stays_is_given_back() -> None:
    told = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(told.stdout) > PIECES * MEGABYTE * 3 // 4


def test_nothing_is_done_where_there_is_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with returned_at_once():
        assert len(np.ones(MEGABYTE, np.uint8)) == MEGABYTE
