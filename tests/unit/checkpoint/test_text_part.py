"""The text part of a multimodal checkpoint runs as it is, and nothing else of it is read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForImageTextToText

from penstock.checkpoint import tensors
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import INDEX_FILE, SINGLE_FILE, glance, resolve, text_name
from penstock.core import ConfigError
from penstock.hosts.weights import Held, ranges_of
from penstock.models.speculators.base import find_tensors
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, VOCAB, WRAPPERS, make_wrapper
from tests.generated import generate
from tests.hub import COMMIT, REPO, serving
from tests.staged import Staged

PROMPT = [17, 3, 99, 42, 8, 64, 120]


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.encoder.layers.3.mlp.fc1.weight", None),
        ("vision_tower.encoder.language_model.weight", None),
        ("mtp.layers.0.mlp.up_proj.weight", None),
    ],
)
def test_names(stored: str, name: str | None) -> None:
    assert text_name(stored) == name


@pytest.mark.parametrize("kind", WRAPPERS)
def test_text_is_that_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    path = make_wrapper(tmp_path, kind)
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype="float32").eval()
    expected = generate(whole, PROMPT, 20)
    assert len(set(expected)) > 5, "a text that repeats itself would hide mistakes"
    assert Staged(path, 3).greedy(PROMPT, 20) == expected


def test_what_is_not_the_text_part_is_not_read(tmp_path: Path) -> None:
    """Such files need not even exist."""
    path = make_wrapper(tmp_path, "qwen3_5", max_shard_size="8KB")
    before = Staged(path, 2).greedy(PROMPT, 4)
    weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if text_name(name) is not None}
    others = set(weight_map.values()) - needed
    assert others
    for file in others:
        (path / file).unlink()
    seen = glance(str(path))
    assert (seen.num_layers, seen.vocab_size) == (LAYERS, VOCAB)
    assert {stored.file.name for stored in find_tensors(path).values()} == needed
    assert Staged(path, 2).greedy(PROMPT, 4) == before
    (path / next(iter(needed))).unlink()
    with pytest.raises(ConfigError, match=r"shard .* is missing"):
        glance(str(path))


class Watched:
    """An open file, or a tensor in it that is not read yet; ``read`` is told the bytes of what is read, by name."""

    def __init__(self, inner: Any, read: Counter[str], name: str = "") -> None:
        self._inner, self._read, self._name = inner, read, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> Watched:
        return Watched(self._inner.__enter__(), self._read)

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def get_slice(self, name: str) -> Watched:
        return Watched(self._inner.get_slice(name), self._read, name)

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[:]

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._inner[index]
        self._read[self._name] += found.nbytes
        return found


def test_of_a_file_that_holds_towers_too_the_text_parts_bytes_alone_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_wrapper(tmp_path, "qwen3_5")
    with safe_open(path / SINGLE_FILE, "pt") as file:
        stored = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    wanted = {name: size for name, size in stored.items() if text_name(name) is not None}
    assert sum(wanted.values()) < sum(stored.values())
    read: Counter[str] = Counter()
    monkeypatch.setattr(tensors, "safe_open", lambda *given, **options: Watched(safe_open(*given, **options), read))
    load_stage(str(path), 0, LAYERS, capacity=8)
    assert read == wanted


def test_another_host_is_sent_the_text_part_alone(tmp_path: Path) -> None:
    path = make_wrapper(tmp_path, "gemma3")
    text = sum(open_checkpoint(str(path)).weights.sizes().values())
    sent = sum(end - start for start, end in ranges_of(path, [Held(0, LAYERS)], LAYERS)[SINGLE_FILE])
    assert text * 4 < sent < text * 4 + 50_000 < (path / SINGLE_FILE).stat().st_size


def test_of_a_hubs_repository_the_text_part_alone_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither towers nor a copy for another library; and once, from then on without the network."""
    (tmp_path / "repository").mkdir()
    whole = make_wrapper(tmp_path / "repository", "qwen3_5", max_shard_size="8KB")
    (whole / "consolidated.safetensors").write_bytes(b"the same for another library")
    (whole / "model_card.md").write_text("nothing that is read")
    weight_map = json.loads((whole / INDEX_FILE).read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if text_name(name) is not None}
    assert needed < set(weight_map.values())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(whole, monkeypatch) as hub:
        place = resolve(REPO)
        small = {file.name for file in whole.glob("*.json")}
        assert sorted(name for name, _ in hub.sent) == sorted(needed | small)
        assert place.name == COMMIT
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(REPO) == place
    assert glance(REPO).num_layers == LAYERS
    assert Staged(place, 2).greedy(PROMPT, 4) == Staged(whole, 2).greedy(PROMPT, 4)
    (place / next(iter(needed))).unlink()
    with pytest.raises(ConfigError, match="not in the local hub cache"):
        resolve(REPO)


def test_a_download_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository").mkdir()
    whole = make_wrapper(tmp_path / "repository", "gemma3")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(whole, monkeypatch) as hub:
        snapshot_download(REPO, allow_patterns=["*.json"])
        hub.sent.clear()
        assert (resolve(REPO) / SINGLE_FILE).is_file()
        assert [name for name, _ in hub.sent] == [SINGLE_FILE]
