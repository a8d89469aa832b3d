"""Every format, unpacked as the reference of the ``gguf`` package does, number for number."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from penstock.checkpoint import gguf_blocks
from penstock.checkpoint.gguf_blocks import FLOATS, UNPACKERS, floats, grouped, mapped
from penstock.checkpoint.gguf_header import TensorInfo
from penstock.core import ConfigError
from tests.gguf_files import SCALES, random_blocks

ROWS, WIDTH = 12, 512
GROUPS = {kind: 16 if kind is Kind.Q6_K else 32 for kind in UNPACKERS}
BITS = {kind: int(kind.name[1]) for kind in UNPACKERS}


def stored(path: Path, kind: Kind, seed: int = 0, offset: int = 64) -> tuple[TensorInfo, np.ndarray]:
    """A file with random blocks at ``offset``: where they are, and the numbers that the reference finds in them."""
    data = random_blocks((ROWS, WIDTH), kind, seed)
    path.write_bytes(bytes(offset) + data.tobytes())
    return TensorInfo("x", (ROWS, WIDTH), kind, offset, data.nbytes, path), gguf.quants.dequantize(data, kind)


def test_every_format_is_tested() -> None:
    assert SCALES.keys() == UNPACKERS.keys()


@pytest.mark.parametrize("kind", UNPACKERS, ids=lambda kind: kind.name)
def test_blocks_become_the_references_floats(tmp_path: Path, kind: Kind) -> None:
    info, expected = stored(tmp_path / "file", kind)
    found = floats(info)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("kind", UNPACKERS, ids=lambda kind: kind.name)
def test_whole_numbers_and_scales_are_the_files(tmp_path: Path, kind: Kind) -> None:
    info, expected = stored(tmp_path / "file", kind, seed=1)
    found = grouped(info)
    assert (found.bits, found.group) == (BITS[kind], GROUPS[kind])
    assert found.values.shape == (ROWS, WIDTH)
    assert found.values.dtype == (torch.uint8 if found.minimums is not None else torch.int8)
    assert found.scales.shape == (ROWS, WIDTH // found.group)
    low, high = (0, 1 << found.bits) if found.minimums is not None else (-(1 << found.bits - 1), 1 << found.bits - 1)
    assert low <= int(found.values.min()) < int(found.values.max()) < high
    np.testing.assert_array_equal(found.dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q6_K], ids=lambda kind: kind.name)
def test_large_tensors_are_unpacked_in_parts(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    info, expected = stored(tmp_path / "file", kind)
    monkeypatch.setattr(gguf_blocks, "CHUNK", 5 * WIDTH)
    np.testing.assert_array_equal(floats(info).numpy(), expected)
    np.testing.assert_array_equal(grouped(info).dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
def test_floats_stay_as_they_are(tmp_path: Path, kind: Kind) -> None:
    expected = torch.randn(ROWS, WIDTH).to(FLOATS[kind])
    (tmp_path / "file").write_bytes(bytes(32) + expected.view(torch.uint8).numpy().tobytes())
    info = TensorInfo("x", (ROWS, WIDTH), kind, 32, expected.nbytes, tmp_path / "file")
    found = floats(info)
    assert found.dtype == FLOATS[kind]
    assert torch.equal(found, expected)


def test_a_file_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    info, _ = stored(tmp_path / "file", Kind.Q8_0)
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="x cannot be read"):
        mapped(info)


def test_nothing_is_written_back(tmp_path: Path) -> None:
    info, _ = stored(tmp_path / "file", Kind.Q8_0)
    before = (tmp_path / "file").read_bytes()
    mapped(info).zero_()
    assert (tmp_path / "file").read_bytes() == before
