"""A packed checkpoint with any part of a weight changed either loads or is refused."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core import ConfigError
from penstock.models.loader import load_module
from tests.packed_checkpoints import FORMS

DTYPES = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.bool)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp("sound")) for name, write in FORMS.items()}


def changed(data: st.DataObject, tensor: Tensor) -> Tensor:
    """The tensor with another type, another shape, or other content."""
    what = data.draw(st.sampled_from(["type", "shape", "axes", "bytes", "none"]), "change")
    if what == "type":
        return tensor.to(data.draw(st.sampled_from(DTYPES), "type"))
    if what == "shape":
        axis = data.draw(st.integers(0, tensor.dim() - 1), "axis") if tensor.dim() else None
        size = data.draw(st.integers(0, 2 * tensor.shape[axis]), "size") if axis is not None else 0
        places = torch.arange(size) % max(1, tensor.shape[axis]) if axis is not None else None
        return tensor if axis is None else tensor.index_select(axis, places).contiguous()
    if what == "axes":
        return data.draw(st.sampled_from([tensor.flatten(), tensor[None], tensor.flatten()[None]]), "axes").contiguous()
    if what == "bytes":
        seed = data.draw(st.integers(0, 2**16), "seed")
        noise = torch.randint(
            0, 256, (tensor.nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        )
        return noise.view(tensor.dtype).reshape(tensor.shape) if tensor.nbytes else tensor
    return tensor[:0] if tensor.dim() else tensor


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_is_refused_or_does_not_matter(
    sound: Mapping[str, Path], tmp_path: Path, form: str, data: st.DataObject
) -> None:
    folder = tmp_path / "mutated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound[form], folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    parts = sorted(name for name in tensors if ".layers.0.mlp.up_proj." in name)
    for name in data.draw(st.sets(st.sampled_from(parts), min_size=1, max_size=2), "parts"):
        if data.draw(st.booleans(), "kept"):
            tensors[name] = changed(data, tensors[name])
        else:
            del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with contextlib.suppress(ConfigError):
        load_module(open_checkpoint(str(folder)), 0, 1, "float32", "cpu")
