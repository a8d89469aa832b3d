"""A stage keeps to its device: run on torch's meta device, no operation mixes its tensors with the host's.

A GPU refuses that, but for copies, indices and single numbers. No arithmetic happens on the meta device, so this says
nothing of the numbers, and nothing of the last step, where picks leave the device. Mixture-of-experts models are left
out: their grouped product has a meta kernel for bfloat16 only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.messages import Features
from penstock.models import stage_model
from penstock.models.speculators.open import load_speculator_stage
from penstock.models.speculators.spd import SpdStage
from penstock.stage.visibility import BatchView, RequestView
from tests import speculators
from tests.checkpoints import ARCHITECTURES, LAYERS, make_checkpoint

EXPERTS = ("mixtral", "gpt_oss", "deepseek_v3")
ROWS = 6


def view() -> BatchView:
    """A batch with a prompt of six rows."""
    order = np.arange(ROWS)
    request = RequestView(0, order, order, order, np.tril(np.ones((ROWS, ROWS), dtype=bool)))
    return BatchView(order * 0, order + 1, order, order, order, [request], order - 1)


class OneDevice(TorchDispatchMode):
    """Raises where an operation is given tensors of the meta device and of the host, as a GPU's would."""

    MAY_MIX: ClassVar = {"_to_copy", "copy_", "index", "index_put_", "_index_put_impl_"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        name = func.overloadpacket.__name__
        assert name in self.MAY_MIX or len({tensor.device.type for tensor in tensors}) < 2, f"{name} mixes devices"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_values_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors hold none, and the probe looks at what enters the first layer and at what leaves the last."""
    monkeypatch.setattr(stage_model, "check_entry", lambda *args: None)


@pytest.mark.parametrize(
    "stages",
    [((0, 2), (2, LAYERS)), pytest.param(((0, LAYERS),), marks=pytest.mark.whole)],
    ids=["two stages", "one stage"],
)
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in EXPERTS])
def test_a_stage_computes_on_its_own_device(
    architecture: str, stages: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    target = str(make_checkpoint(tmp_path, architecture))
    for first, last in stages:
        with OneDevice():
            compute(target, first, last)


def compute(target: str, first: int, last: int) -> None:
    """Layers ``first`` to ``last - 1``, and the logits behind the last of all."""
    stage = stage_model.load_stage(target, first, last, capacity=64, device="meta", max_model_len=128)
    stage.tap([index for index in (1, LAYERS) if first < index <= last])
    entering = None if first == 0 else torch.zeros(ROWS, stage.hidden_size)
    hidden = stage.forward(view(), entering)
    assert hidden.device.type == "meta"
    assert stage.features(hidden).device.type == "meta"
    if last == LAYERS:
        assert stage.logits(hidden, [0, 5]).device.type == "meta"


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "spd", "spd_paper"])
def test_a_learned_drafter_computes_on_its_own_device(kind: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=8)
    folder = getattr(speculators, kind)(open_checkpoint(str(target))).save(tmp_path / kind)
    with OneDevice():
        stage = load_speculator_stage(str(folder), str(target), capacity=64, dtype="float32", device="meta")
        levels = np.minimum(np.arange(ROWS)[::-1], 3) if isinstance(stage, SpdStage) else None
        nodes, slots, layers = list(range(1, ROWS + 1)), list(range(ROWS)), stage.store.layers
        states = torch.zeros(ROWS, stage.hidden_size * len(layers), device="meta")
        stage.add_features(Features(layers=layers, nodes=nodes, slots=slots), states)
        hidden = stage.forward(replace(view(), levels=levels), None)
        assert hidden.device.type == "meta"
        assert stage.module.logits(hidden).device.type == "meta"
