"""Resolving a checkpoint, its defaults, and how layers are split."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import even_split, parse_layer_split, resolve
from penstock.checkpoint.tensors import layer_of, shards
from penstock.core import ConfigError
from penstock.library.names import read_reference
from penstock.models.stage_model import load_stage
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import EOS, LAYERS, make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


def test_open_reads_config_and_eos(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.num_layers == LAYERS
    assert checkpoint.eos_token_ids == (EOS,)
    assert checkpoint.sampling_defaults == {}


def test_a_folder_whose_path_is_no_text_is_said_to_be_it_not_damaged(folder: Path, tmp_path: Path) -> None:
    named = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")
    shutil.copytree(folder, named)
    for place in (named, f"{named}/../{Path(named).name}"):
        with pytest.raises(ConfigError, match="has bytes that are no UTF-8: rename the folder"):
            open_checkpoint(place)


@pytest.mark.parametrize("name", ["loop", "nowhere", "nowhere.gguf"])
def test_a_link_that_leads_nowhere_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).symlink_to(name if name == "loop" else "absent")
    for typed in (name, f"./{name}"):
        assert read_reference(typed) is None
        with pytest.raises(ConfigError, match=f"'{typed}' is a link that leads nowhere"):
            resolve(typed)


@pytest.mark.parametrize(
    ("generation", "eos", "sampling"),
    [
        ({"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.6, "top_k": 20}, (7, 9), (0.6, 20)),
        ({"eos_token_id": 7, "do_sample": False, "temperature": 0.6}, (7,), (0.0, None)),
        ({}, (EOS,), (None, None)),
    ],
)
def test_generation_config_gives_eos_and_sampling(tmp_path: Path, folder: Path, generation, eos, sampling) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.eos_token_ids == eos
    assert (checkpoint.sampling_defaults.get("temperature"), checkpoint.sampling_defaults.get("top_k")) == sampling


@pytest.mark.parametrize("greedy", [True, False])
def test_generation_config_gives_the_repetition_penalty(tmp_path: Path, folder: Path, greedy: bool) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    generation = {"do_sample": not greedy, "temperature": 0.6, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    expected = {"temperature": 0.0 if greedy else 0.6, "repetition_penalty": 1.05}
    assert open_checkpoint(str(tmp_path)).sampling_defaults == expected


def test_hub_ids_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--somebody--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--somebody--tiny" / "refs").mkdir()
    (tmp_path / "models--somebody--tiny" / "refs" / "main").write_text("abc")
    make_checkpoint(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve("somebody/tiny") == snapshot


def test_a_snapshot_in_the_cache_is_a_folder_like_any_other(tmp_path: Path) -> None:
    """Its files are links to the cache's blobs, the shards of an index too."""
    cache = tmp_path / "models--somebody--tiny"
    blobs = make_checkpoint(cache / "blobs", tokenizer=True, max_shard_size="60KB")
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (tmp_path / "current").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "current"):
        checkpoint = open_checkpoint(str(folder))
        assert len(set(shards(folder).values())) > 1
        assert load_tokenizer(folder).encode("a")
        load_stage(str(folder), 0, checkpoint.num_layers, capacity=8, max_model_len=8)


def test_unknown_hub_id_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not in the local hub cache"):
        resolve("somebody/absent")


@pytest.mark.parametrize(("model", "message"), [("/no/such/folder", "no folder"), ("not a name!", "neither")])
def test_nonsense_names_are_refused(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(model)


def test_folder_without_config_or_with_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    with pytest.raises(ConfigError, match="never_heard_of"):
        open_checkpoint(str(tmp_path))


def test_pickled_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"unpickled; convert it to safetensors"):
        shards(tmp_path)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        shards(tmp_path)


def test_layer_of_reads_the_layer_number() -> None:
    assert layer_of("model.layers.12.mlp.experts.3.w1.weight") == 12
    assert layer_of("model.embed_tokens.weight") is None
    assert layer_of("lm_head.weight") is None


@pytest.mark.parametrize(
    ("layers", "stages", "head", "counts"),
    [
        (16, 1, 5.0, [16]),
        (16, 4, 0.0, [4, 4, 4, 4]),
        (16, 4, 4.0, [5, 5, 5, 1]),
        (16, 4, 40.0, [5, 5, 5, 1]),
        (5, 3, 1.0, [2, 2, 1]),
        (5, 5, 1.0, [1, 1, 1, 1, 1]),
        (2, 4, 1.0, [0, 1, 1, 0]),
    ],
)
def test_even_split(layers: int, stages: int, head: float, counts: list[int]) -> None:
    ranges = even_split(layers, stages, head)
    assert sorted(last - first for first, last in ranges[:-1]) == sorted(counts[:-1])
    assert ranges[-1][1] - ranges[-1][0] == counts[-1]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layers
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def test_even_split_weighs_the_head_by_parameters(tmp_path: Path) -> None:
    light = open_checkpoint(str(make_checkpoint(tmp_path / "light", vocab_size=64))).even_split(2)
    heavy = open_checkpoint(str(make_checkpoint(tmp_path / "heavy", vocab_size=1500))).even_split(2)
    assert light == [(0, 3), (3, 5)]
    assert heavy == [(0, 4), (4, 5)]


def test_parse_layer_split() -> None:
    assert parse_layer_split("4,6,0,6", 16) == [(0, 4), (4, 10), (10, 10), (10, 16)]


@pytest.mark.parametrize(
    ("text", "message"), [("4,x", "numbers of layers"), ("20,-4", "negative"), ("4,4", "adds up to 8.*has 16")]
)
def test_wrong_layer_splits_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layer_split(text, 16)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.gguf", "there is no file"),
        ("model.onnx", "is a file; give a checkpoint's folder, or a file ending in .gguf"),
        ("model.bin", "is a file; give a checkpoint's folder, or a file ending in .gguf"),
        (".", r"holds no config\.json, .*; give the file itself: .*some\.gguf"),
    ],
)
def test_a_file_is_a_gguf_file(tmp_path: Path, name: str, problem: str) -> None:
    for file in ("model.onnx", "model.bin", "some.gguf"):
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(tmp_path / name))
