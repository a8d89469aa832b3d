"""Errors in a checkpoint's files are named by file and field, and nothing is built that its shards cannot fill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.config_fields import MOST_TOKENS
from penstock.core import ConfigError, RequestError
from penstock.models.loader import load_module
from penstock.models.stage_model import load_stage
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import BYTE_VOCAB, LAYERS, make_checkpoint

INDEX = "model.safetensors.index.json"
A_TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sound"), tokenizer=True)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sharded"), max_shard_size="60KB")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "hostile")


@pytest.fixture
def shards_folder(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "hostile")


def change(file: Path, **fields: Any) -> None:
    table = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**table, **fields}))


def remap(folder: Path, file: object) -> None:
    """Have the index say that one tensor lies in ``file``."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    change(folder / INDEX, weight_map={**weight_map, A_TENSOR: file})


def rewrite(folder: Path, **changed: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **changed}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("weight_map", [[], ["model.safetensors"], None, "x", 3])
def test_a_weight_map_is_a_table(shards_folder: Path, weight_map: object) -> None:
    change(shards_folder / INDEX, weight_map=weight_map)
    with pytest.raises(ConfigError, match=r"index\.json: weight_map is .*it has to lead from tensors to files"):
        open_checkpoint(str(shards_folder))


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "pytorch_model.bin", 3, None, ["x"]]
)
def test_a_weight_map_stays_in_the_folder(shards_folder: Path, file: object) -> None:
    some = next(shards_folder.glob("*.safetensors"))
    shutil.copy(some, shards_folder.parent / "model.safetensors")
    remap(shards_folder, file)
    with pytest.raises(ConfigError, match=r"weight_map\.model\.layers\.1.* has to be a safetensors file in the same"):
        open_checkpoint(str(shards_folder))


def test_a_shard_is_no_link_out_of_the_folder(shards_folder: Path) -> None:
    shard = sorted(shards_folder.glob("*.safetensors"))[0]
    shutil.move(shard, shards_folder.parent / "elsewhere.safetensors")
    shard.symlink_to("../elsewhere.safetensors")
    with pytest.raises(ConfigError, match=r"model-00001.* is a link to .*elsewhere\.safetensors, outside"):
        open_checkpoint(str(shards_folder))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[1]", '"x"', "3", "null", "{", '{"model": 3}', '{"model": {"type": "BPE"}}'])
def test_a_tokenizers_files_are_refused_by_name(folder: Path, name: str, content: str) -> None:
    if name == "tokenizer_config.json" and content.startswith('{"'):
        content = '{"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": 3}'
    (folder / name).write_text(content)
    with pytest.raises(
        ConfigError, match=r"tokenizer_config\.json (holds|is not)|is no tokenizer's|no tokenizer that loads"
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize("length", ['"x"', "[]", "{}"])
def test_a_tokenizer_that_cannot_encode_is_refused_when_it_is_opened(folder: Path, length: str) -> None:
    change(folder / "tokenizer_config.json", model_max_length=json.loads(length))
    with pytest.raises(ConfigError, match="has no tokenizer that loads"):
        load_tokenizer(folder)


def test_a_text_that_the_vocabulary_lacks_is_the_requests_fault(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {"a": 0, "b": 1}, "unk_token": "?"}
    content |= {"pre_tokenizer": None, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("ab") == [0, 1]
    with pytest.raises(RequestError, match=r"prompt cannot be read by the tokenizer .*not found in the vocabulary"):
        tokenizer.encode("c")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", ["x", 1.5, [["x"]], {"id": 1}, -1])
def test_eos_is_a_token(folder: Path, file: str, eos: object) -> None:
    (folder / "generation_config.json").unlink()
    change(folder / file, eos_token_id=eos)
    with pytest.raises(ConfigError, match=rf"{file}.*eos_token_id"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [BYTE_VOCAB, [1, 10**9]])
def test_eos_is_in_the_vocabulary(folder: Path, file: str, eos: object) -> None:
    (folder / "generation_config.json").unlink()
    change(folder / file, eos_token_id=eos)
    with pytest.raises(ConfigError, match=rf"{file}: eos_token_id is \d+; the vocabulary has {BYTE_VOCAB} tokens"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_p", [1]), ("top_k", 1.5), ("repetition_penalty", 0)],
)
def test_sampling_defaults_are_ones(folder: Path, field: str, value: object) -> None:
    change(folder / "generation_config.json", **{field: value})
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field} is "):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 1_000_000), ("num_labels", 10**12)])
def test_counts_that_no_model_has_are_refused_before_anything_is_made_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: int
) -> None:
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it was made"))
    change(folder / "config.json", **{field: value})
    with pytest.raises(ConfigError, match=rf"config\.json: {field} is {value}; no model has more than"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("layers", [LAYERS + 1, 50_000])
def test_more_layers_than_the_shards_hold_are_refused(folder: Path, layers: int) -> None:
    change(folder / "config.json", num_hidden_layers=layers)
    with pytest.raises(ConfigError, match=rf"num_hidden_layers is {layers}, but the shards hold {LAYERS} layers"):
        open_checkpoint(str(folder))


def test_fewer_layers_than_the_shards_hold_are_a_models_own_choice(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=LAYERS - 1)
    assert open_checkpoint(str(folder)).num_layers == LAYERS - 1


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 0), ("hidden_size", -32), ("max_position_embeddings", 0)])
def test_sizes_are_above_zero(folder: Path, field: str, value: int) -> None:
    change(folder / "config.json", **{field: value}, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=rf"config\.json.*{field}|config\.json cannot be used"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("size", [MOST_TOKENS + 1, 2**31, 10**12])
def test_a_vocabulary_that_no_grammar_could_hold_is_refused_when_it_is_opened(folder: Path, size: int) -> None:
    """llguidance would set aside memory for every token, 50 GB for 2**31, before any tensor is looked at."""
    change(folder / "config.json", vocab_size=size)
    with pytest.raises(ConfigError, match=rf"config\.json: vocab_size is {size}; a vocabulary may have \d+ tokens"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "head_dim"])
def test_what_the_shards_cannot_fill_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """transformers would fill such a matrix with random numbers before it says that it did not fit."""
    monkeypatch.setattr("transformers.PreTrainedModel._initialize_missing_keys", lambda *_: pytest.fail("it was made"))
    change(folder / "config.json", **{field: MOST_TOKENS if field == "vocab_size" else 1 << 24})
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=r"wrong shape: .* is .*, config\.json says .*"):
        load_module(checkpoint, 0, LAYERS, "float32", "cpu")


def test_nor_where_the_shards_hold_it_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel._initialize_missing_keys", lambda *_: pytest.fail("it was made"))
    folder = make_checkpoint(tmp_path, "mixtral")
    change(folder / "config.json", num_local_experts=50_000)
    change(folder / "config.json", intermediate_size=1 << 20)
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=r"wrong shape|config\.json describes \d+ numbers, the shards hold \d+"):
        load_module(checkpoint, 0, LAYERS, "float32", "cpu")


@pytest.mark.parametrize("name", [A_TENSOR, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_are_floats(folder: Path, name: str, dtype: torch.dtype) -> None:
    held = load_file(folder / "model.safetensors")[name]
    rewrite(folder, **{name: held.to(dtype)})
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=rf"{name} is stored as \w+; a weight has to be a float"):
        load_module(checkpoint, 0, LAYERS, "float32", "cpu")
    with pytest.raises(ConfigError, match=rf"{name} is stored as"):
        checkpoint.even_split(2)


def test_biases_are_floats_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    name = "model.layers.1.self_attn.q_proj.bias"
    rewrite(folder, **{name: torch.ones(32, dtype=torch.int32)})
    with pytest.raises(ConfigError, match=rf"{name} is stored as I32; a weight has to be a float"):
        load_module(open_checkpoint(str(folder)), 0, LAYERS, "float32", "cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "nonsense"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("rope_parameters", {"rope_type": "x"}),
    ],
)
def test_a_configuration_that_describes_no_model_is_refused(folder: Path, field: str, value: object) -> None:
    change(folder / "config.json", **{field: value})
    with pytest.raises(ConfigError, match=r"config\.json|wrong shape"):
        load_stage(str(folder), 0, LAYERS, capacity=8, max_model_len=8)


def test_a_message_cannot_steer_a_terminal(folder: Path) -> None:
    change(folder / "config.json", **{"\x1b[2Jnum_": {"num_\ud800": 10**9}})
    with pytest.raises(ConfigError) as error:
        open_checkpoint(str(folder))
    assert str(error.value).isprintable()
    assert str(error.value).encode()
