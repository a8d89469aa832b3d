"""Checkpoints whose numbers are none: refused by the user's own file and field, before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from penstock.core import ConfigError
from penstock.models.checkpoint import check_numbers, open_checkpoint
from penstock.models.stage_model import load_stage
from tests.checkpoints import ARCHITECTURES, FURTHER, LAYERS, RECURRENT, UNUSUAL, make_checkpoint, settings_of
from tests.relatives import RELATIVES

FIELDS = [("rms_norm_eps", value) for value in (float("nan"), float("inf"), -1.0, "small")]
FIELDS += [("rope_theta", value) for value in (0, 0.0, -1e4, float("nan"), float("inf"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama")
    return tmp_path


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
    check_numbers(AutoConfig.for_model(**settings_of(family)), Path("config.json"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["input_layernorm", "q_proj", "down_proj", "post_attention_layernorm"])
def test_a_weight(folder: Path, kind: str, value: float) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if kind in name)
    tensors[name].view(-1)[0] = torch.tensor(value)
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=f"{folder}: .* holds NaN or infinity"):
        load_stage(str(folder), 0, checkpoint.num_layers, capacity=16)
