"""Linear weights are read one by one as they are packed, and the stage is the same as if all had been read before."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.strategies.families import ALL
from penstock.checkpoint import tensors
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core import ConfigError
from penstock.models import stage_model
from penstock.models.linear import read_later, works
from penstock.models.loader import read_module
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, make_checkpoint
from tests.gguf_files import make_gguf
from tests.unit.models.compiled.digests import logits

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")

FORMATS = [(quantization, dtype) for quantization in ("int8", "int4") for dtype in ("float32", "bfloat16")]
SAMPLE = ("qwen3", "gemma2", "deepseek_v3", "nemotron_h", "gemma3n")
"""Fused layers, others, latents, states from row to row, and rows that carry more than one state."""


def at_once(checkpoint, first, last, dtype, device, on_read=None, files=None, *, held=True):
    """``read_module`` with all numbers; whole ones are read once more by packing."""
    module = read_module(checkpoint, first, last, dtype, device, on_read, held=held)
    stored = checkpoint.weights.slices(checkpoint.weights.names(), files) if files else {}
    for name, linear in module.named_modules():
        tensor = stored.get(f"{name}.weight")
        if type(linear) is nn.Linear and getattr(tensor, "is_grouped", False):
            read_later(linear, name, tensor, "")
    return module


def compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, formats: Sequence[tuple[str, str]] = tuple(FORMATS)
) -> None:
    for quantization, dtype in formats:
        options = {"quantization": quantization, "dtype": dtype}
        try:
            found = logits(folder, options)
        except ConfigError as error:
            if "is for linear layers" not in str(error):
                raise
            continue
        with monkeypatch.context() as patched:
            patched.setattr(stage_model, "read_module", at_once)
            assert torch.equal(found, logits(folder, options)), options


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    compared(make_checkpoint(tmp_path, name), monkeypatch)


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name in ALL if name not in SAMPLE])
def test_all_other_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    compared(make_checkpoint(tmp_path, name), monkeypatch)


BLOCKS = (Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q6_K, Kind.Q8_0)


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        *((kind, [FORMATS[number % len(FORMATS)]]) for number, kind in enumerate(BLOCKS)),
        *(pytest.param(kind, FORMATS, marks=pytest.mark.whole) for kind in BLOCKS),
    ],
)
def test_files_in_every_kind_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, formats: list[tuple[str, str]]
) -> None:
    """Each kind in one format, which take turns: reading numbers and packing them know nothing of each other."""
    wide = {"hidden_size": 256, "intermediate_size": 256}
    compared(make_gguf(tmp_path, kind=kind, **wide), monkeypatch, formats)


@pytest.mark.parametrize("make", [make_checkpoint, partial(make_gguf, kind=Kind.Q8_0)])
def test_before_packing_all_layers_hold_no_more_than_one(tmp_path: Path, make) -> None:
    with contextlib.ExitStack() as files:
        module = read_module(open_checkpoint(str(make(tmp_path))), 0, LAYERS, "float32", "cpu", None, files)
        held = [
            {one.weight.data_ptr() for one in layer.modules() if type(one) is nn.Linear}
            for layer in module.model.layers
        ]
    assert len(held[0]) > 1
    assert all(places == held[0] for places in held)


@pytest.mark.parametrize("make", [make_checkpoint, partial(make_gguf, kind=Kind.Q8_0)])
def test_all_numbers_are_told_in_the_end_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setattr(tensors, "SECONDS", 0.0)
    path, told = make(tmp_path), []
    load_stage(str(path), 0, LAYERS, capacity=8, quantization="int8", on_read=lambda *words: told.append(words))
    total = sum(open_checkpoint(str(path)).weights.sizes().values())
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert len(told) > LAYERS


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_no_number_is_named(tmp_path: Path, quantization: str) -> None:
    file = make_checkpoint(tmp_path, "llama") / "model.safetensors"
    stored, name = load_file(file), "model.layers.2.mlp.up_proj.weight"
    stored[name][3, 5] = torch.nan
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} holds NaN or infinity in float32: download"):
        load_stage(str(tmp_path), 0, LAYERS, capacity=8, quantization=quantization)
