"""A stage for another device, torch's meta device: read and joined on the CPU, and moved layer by layer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.models import stage_model
from penstock.models.fused import FusedLayer, RMSNorm
from penstock.models.loader import load_module, read_module
from penstock.models.packing import move
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, make_checkpoint

CAPACITY = 16
MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def _no_values_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_model, "check_entry", lambda *args: None)


def test_a_layer_is_moved_before_the_next_one_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    join = FusedLayer.join

    def joining(layer: FusedLayer) -> None:
        events.append(f"join {layer.layer_idx}")
        join(layer)

    def moving(module: nn.Module, device: torch.device) -> None:
        on_cpu = [one for one in module.parameters() if one.device.type == "cpu"]
        if on_cpu:
            events.append(f"move {getattr(module, 'layer_idx', 'ends')}")
        move(module, device)

    monkeypatch.setattr(FusedLayer, "join", joining)
    monkeypatch.setattr(stage_model, "move", moving)
    target = str(make_checkpoint(tmp_path, "qwen3"))
    stage = load_stage(target, 1, LAYERS, capacity=CAPACITY, device="meta", dtype="bfloat16")
    layers = [f"{event} {layer}" for layer in range(1, LAYERS) for event in ("join", "move")]
    assert events[: len(layers)] == layers
    assert set(events[len(layers) :]) == {"move ends"}
    assert stage.weight_bytes == load_stage(target, 1, LAYERS, capacity=CAPACITY, dtype="bfloat16").weight_bytes


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Every tensor that a module or a part of it holds, in whatever attribute."""
    held: list[Tensor] = []
    for part in module.modules():
        values: list[Any] = [*vars(part).values(), *part._parameters.values(), *part._buffers.values()]
        values += [one for value in values if isinstance(value, dict) for one in value.values()]
        held += [one for one in values if isinstance(one, Tensor)]
    return held


@pytest.mark.parametrize(
    "architecture", ["llama", "llama_tied", "qwen3", "gemma3n", "qwen3_5", "deepseek_v3", "gpt_oss"]
)
def test_nothing_stays_behind(tmp_path: Path, architecture: str) -> None:
    target = str(make_checkpoint(tmp_path, architecture))
    options = {"capacity": CAPACITY, "device": "meta", "dtype": "bfloat16", "max_model_len": CAPACITY}
    stage = load_stage(target, 0, LAYERS, **options)  # type: ignore[arg-type]
    assert {one.device.type for one in tensors_of(nn.ModuleList([stage._base, stage._causal]))} == {"meta"}


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux tells what is mapped")
def test_weights_in_the_wanted_format_are_not_copied(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_checkpoint(tmp_path)))
    file = next(tmp_path.glob("*.safetensors")).resolve()

    def mapped(module: Any) -> bool:
        address = module.model.layers[1].mlp.down_proj.weight.data_ptr()
        for line in MAPS.read_text().splitlines():
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return line.endswith(str(file))
        return False

    assert mapped(read_module(checkpoint, 0, 2, "float32", "meta"))
    # Of weights that the CPU computes with there are copies: whoever writes into the file would change them.
    assert not mapped(read_module(checkpoint, 0, 2, "float32", "cpu"))
    assert load_module(checkpoint, 0, 2, "float32", "meta").model.layers[1].mlp.down_proj.weight.is_meta


def test_norms_and_sinks_move_though_they_are_no_parameters() -> None:
    norm = RMSNorm(torch.ones(8), 1e-6).to("meta")
    assert norm.scaled.is_meta
    assert norm.least.is_meta


def test_all_cores_compare_layers_for_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    pin = stage_model.pin_rope

    def pinning(*arguments: Any) -> None:
        seen.append(torch.get_num_threads())
        pin(*arguments)

    monkeypatch.setattr(stage_model, "pin_rope", pinning)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
    target, before = str(make_checkpoint(tmp_path)), torch.get_num_threads()
    for device in ("cpu", "meta"):
        load_stage(target, 0, 2, capacity=CAPACITY, device=device)
    assert seen == [before, 3]
    assert torch.get_num_threads() == before
