"""A stage reads its own tensors and nothing else, and never runs with a missing one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import INDEX_FILE, SINGLE_FILE
from penstock.core import ConfigError
from penstock.files import torch_dtype
from penstock.models.loader import ForeignLayer, load_module
from tests.checkpoints import LAYERS, make_checkpoint


def load(folder: Path, first: int, last: int, dtype: str = "float32"):
    return load_module(open_checkpoint(str(folder)), first, last, dtype, "cpu")


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def names(module) -> set[str]:
    return {name.split(".")[1] if name.startswith("model.") else name for name, _ in module.named_parameters()}


def test_each_stage_holds_its_own_part(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    first, middle, last = load(folder, 0, 2), load(folder, 2, 4), load(folder, 4, LAYERS)
    assert names(first) == {"embed_tokens", "layers"}
    assert names(middle) == {"layers"}
    assert names(last) == {"layers", "norm", "lm_head.weight"}
    assert [isinstance(layer, ForeignLayer) for layer in middle.model.layers] == [True, True, False, False, True]


def test_tied_ends_share_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama_tied")
    assert "lm_head.weight" not in load_file(folder / SINGLE_FILE)
    first, last, whole = load(folder, 0, 2), load(folder, 2, LAYERS), load(folder, 0, LAYERS)
    assert names(first) == {"embed_tokens", "layers"}
    assert names(last) == {"layers", "norm", "lm_head.weight"}
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    torch.testing.assert_close(last.lm_head.weight, first.model.embed_tokens.weight, atol=0, rtol=0)


def test_tied_checkpoint_that_stores_the_head_only(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama_tied")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    first, last = load(folder, 0, 2), load(folder, 2, LAYERS)
    torch.testing.assert_close(last.lm_head.weight, first.model.embed_tokens.weight, atol=0, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_stay_what_they_were_when_somebody_writes_into_their_file(
    tmp_path: Path, dtype: str, tied: bool
) -> None:
    """In every format: with the file's own, nothing has to be converted, and nothing may stay a mapping of the file."""
    folder = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    rewrite(folder, lambda tensors: tensors.update({name: one.to(torch_dtype(dtype)) for name, one in tensors.items()}))
    module = load(folder, 0, LAYERS, dtype)
    assert (module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()) == tied
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with (folder / SINGLE_FILE).open("r+b") as file:
        file.write(bytes((folder / SINGLE_FILE).stat().st_size))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_only_the_shards_of_own_layers_are_opened(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_shard_size="20KB")
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    own = {file for name, file in weight_map.items() if ".layers.2." in name}
    for file in set(weight_map.values()) - own:
        (folder / file).unlink()
    assert names(load(folder, 2, 3)) == {"layers"}
    with pytest.raises(ConfigError, match=r"shard .* is missing"):
        load(folder, 1, 3)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
)
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        load(folder, 0, LAYERS)


def test_missing_tensor_of_another_stage_does_not_matter(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    load(folder, 2, LAYERS)


def test_missing_expert_is_refused(tmp_path: Path) -> None:
    """Experts are stored one by one and stacked while loading."""
    folder = make_checkpoint(tmp_path, "mixtral")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight"))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        load(folder, 0, LAYERS)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3, 3)}))
    with pytest.raises(ConfigError, match=rf"{name} is \(3, 3\), config.json says \(48, 32\)"):
        load(folder, 0, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_take_the_asked_dtype(tmp_path: Path, dtype: str) -> None:
    module = load(make_checkpoint(tmp_path), 0, LAYERS, dtype)
    assert {p.dtype for p in module.parameters()} == {getattr(torch, dtype)}


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_checkpoint(tmp_path)))
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load_module(checkpoint, 0, 1, "int8", "cpu")
    with pytest.raises(ConfigError, match="layers 3 to 9"):
        load_module(checkpoint, 3, 9, "float32", "cpu")
    with pytest.raises(ConfigError, match="device 'nonsense'"):
        load_module(checkpoint, 0, 1, "float32", "nonsense")
