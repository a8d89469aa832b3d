"""Checkpoints with fields or weights that are no usable numbers are refused by file and field before anything runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.config_fields import check_stated
from penstock.checkpoint.gguf_blocks import READABLE
from penstock.checkpoint.gguf_header import read_header
from penstock.core import ConfigError
from penstock.models.loader import check_loads, load_module
from penstock.models.speculators.open import open_speculator
from tests import gguf_files
from tests.checkpoints import ARCHITECTURES, FURTHER, LAYERS, RECURRENT, UNUSUAL, make_checkpoint, settings_of
from tests.gguf_files import make_gguf
from tests.packed_checkpoints import FORMS
from tests.relatives import RELATIVES
from tests.speculators import eagle3

FIELDS: Final = [("rms_norm_eps", value) for value in (float("nan"), float("inf"), -1.0, "small")]
FIELDS += [("rope_theta", value) for value in (0, 0.0, -1e4, float("nan"), float("inf"))]
DAMAGED: Final = (float("nan"), float("inf"), float("-inf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama")
    return tmp_path


def damaged(folder: Path, part: str, value: float) -> str:
    """One number of a tensor of floats whose name ends so: its name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(part) and tensors[name].is_floating_point())
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def load_all(place: Path, dtype: str = "float32") -> None:
    """Run the engine's checks before its start, and then a stage's reading."""
    checkpoint = open_checkpoint(str(place))
    check_loads(checkpoint)
    load_module(checkpoint, 0, checkpoint.num_layers, dtype, "cpu")


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_field_of_the_configuration(folder: Path, field: str, value: Any) -> None:
    table = json.loads((folder / "config.json").read_text())
    for holder in (table, table.get("rope_parameters") or {}):
        if field in holder or holder is table:
            holder[field] = value
    (folder / "config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=f"config.json.*{field}|config.json cannot be used"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("bad", [-1e4, float("nan"), float("inf"), "large"])
def test_a_field_that_has_a_number_for_every_layer(tmp_path: Path, bad: Any) -> None:
    """Granite with windows names each layer's base; 0 and null are layers that turn nothing."""
    make_checkpoint(tmp_path, "granite_swa", layer_rope_theta=[1e4, 0, 5e4, 1e4, 1e4])
    assert open_checkpoint(str(tmp_path)).num_layers == LAYERS
    table = json.loads((tmp_path / "config.json").read_text())
    table["layer_rope_theta"][3] = bad
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"config.json.*layer_rope_theta|config.json cannot be used"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("family", sorted(ARCHITECTURES | FURTHER | RECURRENT | UNUSUAL | RELATIVES))
def test_no_known_family_is_refused(family: str) -> None:
    stated = AutoConfig.for_model(**settings_of(family)).to_json_string(use_diff=False)
    check_stated(json.loads(stated), Path("config.json"))


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "deepseek_v3"])
def test_every_tensor_of_a_checkpoint(tmp_path: Path, architecture: str) -> None:
    """Those of a layer once. Experts that no row is sent to and the embedding's rows are looked at as all others."""
    source = make_checkpoint(tmp_path / "sound", architecture)
    load_all(source)
    names = {re.sub(r"\d+", "", name): name for name in load_file(source / "model.safetensors")}
    for number, name in enumerate(names.values()):
        place = shutil.copytree(source, tmp_path / "damaged")
        damaged(place, name, DAMAGED[number % len(DAMAGED)])
        part = r"\.mlp\.experts\." if ".experts." in name else re.escape(name)
        with pytest.raises(ConfigError, match=rf"{part}\S* holds NaN or infinity in float32: download"):
            load_all(place)
        shutil.rmtree(place)


STORED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def formats_and_values() -> Iterator[Any]:
    """Every format with one value, all values in turn; and, as ``whole``, with the others."""
    for number, stored in enumerate(STORED):
        for i, value in enumerate(DAMAGED):
            sampled = i == number % len(DAMAGED)
            yield pytest.param(stored, value, marks=[] if sampled else [pytest.mark.whole])


@pytest.mark.parametrize(("stored", "value"), [*formats_and_values()])
def test_every_format_of_floats(folder: Path, stored: torch.dtype, value: float) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    load_all(folder)
    name = damaged(folder, "down_proj.weight", value)
    for dtype in ("float32", "bfloat16", "float16"):
        with pytest.raises(ConfigError, match=rf"{name} holds NaN or infinity in {dtype}"):
            load_all(folder, dtype)


def test_numbers_that_the_dtype_asked_for_cannot_hold(folder: Path) -> None:
    damaged(folder, "lm_head.weight", 1e5)
    load_all(folder)
    with pytest.raises(ConfigError, match=r"lm_head\.weight holds NaN or infinity in float16: .* a wider range"):
        load_all(folder, "float16")


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_packed_weights(tmp_path: Path, form: str) -> None:
    place = FORMS[form](tmp_path)
    load_all(place)
    tensors = load_file(place / "model.safetensors")
    (part,) = {
        name.rpartition(".")[2]
        for name, one in tensors.items()
        if one.is_floating_point() and re.search("scale|absmax|SCB$", name)
    }
    name = damaged(place, part, float("nan"))
    with pytest.raises(ConfigError, match=rf"{name.removesuffix(part).removesuffix('weight.')}weight holds NaN"):
        load_all(place)


WITHOUT_NAN: Final = (Kind.NVFP4,)
"""Formats in which every block is numbers: NVFP4's scales have no code for NaN or infinity."""


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind not in WITHOUT_NAN], ids=lambda kind: kind.name)
def test_scales_of_gguf_blocks(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of ones in all bits has a scale that is no number; one of zeros is a block of zeros."""
    monkeypatch.setattr(gguf_files, "stored_as", zeros)
    path = make_gguf(tmp_path, kind=kind, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    info = read_header(path).tensors["blk.0.ffn_down.weight"]
    load_all(path)
    with path.open("r+b") as file:
        file.seek(info.start)
        file.write(b"\xff" * (info.nbytes // info.shape[0]))
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj\.weight holds NaN"):
        load_all(path)


def zeros(data: np.ndarray, kind: Kind) -> np.ndarray:
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((len(data), data.shape[-1] // per_block * size), np.uint8) if data.ndim == 2 else data


def test_drafters(tmp_path: Path) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target")))
    place = eagle3(target).save(tmp_path / "drafter")
    name = damaged(place, "q_proj.weight", float("nan"))
    with pytest.raises(ConfigError, match=rf"^speculative_config\.model is .*drafter': {name} holds NaN"):
        open_speculator(str(place), target).load(target, "float32", "cpu")
