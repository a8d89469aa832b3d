"""Every format that llama.cpp's quantiser writes: the file's numbers, and logits beside llama.cpp's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf_blocks import FLOATS, LOOKED_UP, OF_FOUR_BITS, READABLE, UNPACKERS
from penstock.checkpoint.gguf_header import read_header
from penstock.core import ConfigError
from penstock.models.loader import load_whole
from penstock.models.packing import weights_format
from tests.gguf_files import make_gguf, split_gguf
from tests.llama_cpp import logits, needs_llama_cpp

IDS: Final = [5, 9, 13, 9, 5, 70, 31, 100]
BOUND: Final = 0.06
"""Mean difference of log-probabilities: llama.cpp rounds what goes into a product to eight bits where weights are."""
SLOW: Final = (Kind.IQ1_M, Kind.IQ1_S, Kind.IQ2_S, Kind.IQ2_XS, Kind.IQ2_XXS)
"""Formats for which llama.cpp's quantiser first makes tables, for seconds."""
KINDS: Final = [
    pytest.param(kind, id=kind.name, marks=[pytest.mark.whole] if kind in SLOW else []) for kind in READABLE
]


def log_probabilities(found: np.ndarray) -> np.ndarray:
    shifted = found - found.max(-1, keepdims=True)
    lowered: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return lowered


@needs_llama_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_has_llama_cpps_numbers(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as llama.cpp's quantiser writes them: random blocks have values far beyond a model's."""
    monkeypatch.setattr("tests.gguf_files.SCALES", {})
    widths = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.05}
    path = make_gguf(tmp_path, kind=kind, **widths)
    stored = {info.kind for name, info in read_header(path).tensors.items() if len(info.shape) == 2}
    assert stored == {kind}
    checkpoint = open_checkpoint(str(path))
    with torch.inference_mode():
        found = load_whole(checkpoint, "float32")(torch.tensor([IDS])).logits[0].numpy()
    wanted = logits(path, IDS)
    difference = np.abs(log_probabilities(found) - log_probabilities(wanted)).mean()
    assert difference < (2e-4 if kind is Kind.F32 else BOUND)


@needs_llama_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_held_in_the_bits_that_keep_it(tmp_path: Path, kind: Kind) -> None:
    path = make_gguf(tmp_path, kind=kind, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    wanted = "none" if kind in FLOATS else "int4" if kind in OF_FOUR_BITS else "int8"
    assert weights_format("auto", "cpu", open_checkpoint(str(path))) == wanted
    assert (kind in LOOKED_UP) != (kind in FLOATS or kind in UNPACKERS)


# --------------------------------------------------------------------------------------------------------- split files


def test_a_model_over_several_files_is_the_same(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "whole", kind=Kind.Q8_0)
    files = split_gguf(path, tmp_path, 3)
    checkpoint = open_checkpoint(str(files[0]))
    assert checkpoint.weights.files == files
    whole, found = (load_whole(one, "float32").state_dict() for one in (open_checkpoint(str(path)), checkpoint))
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_what_is_wrong_with_several_files_is_said(tmp_path: Path) -> None:
    files = split_gguf(make_gguf(tmp_path / "whole"), tmp_path, 2)
    with pytest.raises(ConfigError, match=r"00002-of-00002\.gguf is not the first of 2 files; give .*00001-of-00002"):
        open_checkpoint(str(files[1]))
    alone = shutil.copy(files[0], tmp_path / "renamed.gguf")
    with pytest.raises(ConfigError, match=r"split\.count is 2; the first of so many files is called NAME"):
        open_checkpoint(str(alone))
    files[1].unlink()
    with pytest.raises(ConfigError, match=r"00002-of-00002\.gguf is missing, one of the 2 files of this model"):
        open_checkpoint(str(files[0]))
    shutil.copy(files[0], files[1])
    with pytest.raises(ConfigError, match=r"split\.no is 0, not 1: another model's"):
        open_checkpoint(str(files[0]))
