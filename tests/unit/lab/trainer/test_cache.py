"""The cache holds the target's states, under a name that changes with all that they depend on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.core import ConfigError
from penstock.lab.trainer import states as cache
from penstock.lab.trainer.corpus import Corpus
from penstock.lab.trainer.states import StateCache, Wanted, fill, key_of, of_layer, shards_of
from tests.training import LAYERS, changed, corpus_of

READS = (0, 2, LAYERS)


@pytest.fixture
def corpus() -> Corpus:
    return corpus_of(20, 7, 30, 3, 16)


def wanted_of(target: Checkpoint) -> Wanted:
    return Wanted(target, READS, 32, "float32")


def test_it_holds_what_transformers_gives(
    tmp_path: Path, target: Checkpoint, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SHARD_TOKENS", 25)
    assert shards_of(corpus.samples) == [range(2), range(2, 3), range(3, 5)]
    assert list(fill(tmp_path, corpus, wanted_of(target), "cpu"))[-1] == 76
    held = StateCache(tmp_path, corpus.samples, READS)
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    for i, sample in enumerate(corpus.samples):
        with torch.inference_mode():
            states = model(torch.from_numpy(sample.tokens_L)[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[k][0] for k in READS], dim=-1)
        torch.testing.assert_close(held.states(i), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(of_layer(held.states(i), READS, [LAYERS]), states[-1][0], atol=1e-4, rtol=1e-4)


def test_a_partial_cache_goes_on(
    tmp_path: Path, target: Checkpoint, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SHARD_TOKENS", 25)
    filling = fill(tmp_path, corpus, wanted_of(target), "cpu")
    reached = 0
    while reached < 40:  # within the second shard
        reached = next(filling)
    filling.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00000.safetensors"]
    before = (tmp_path / "00000.safetensors").stat().st_mtime_ns
    assert next(fill(tmp_path, corpus, wanted_of(target), "cpu")) == 27
    assert list(fill(tmp_path, corpus, wanted_of(target), "cpu"))[-1] == 76
    assert (tmp_path / "00000.safetensors").stat().st_mtime_ns == before
    assert list(fill(tmp_path, corpus, wanted_of(target), "cpu")) == [76]


def test_the_key_changes_with_everything_that_the_states_depend_on(
    tmp_path: Path, target: Checkpoint, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = wanted_of(target)
    key = key_of(wanted, corpus)
    assert key == key_of(wanted_of(open_checkpoint(str(target.path))), corpus_of(20, 7, 30, 3, 16))
    others = [key_of(changed(wanted, layers=(0, 1, LAYERS)), corpus), key_of(changed(wanted, max_length=31), corpus)]
    others += [key_of(changed(wanted, dtype="bfloat16"), corpus), key_of(wanted, corpus_of(20, 7, 30, 3, 15))]
    copy = Path(shutil.copytree(target.path, tmp_path / "copy"))
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    others.append(key_of(changed(wanted, target=open_checkpoint(str(copy))), corpus))
    (copy / "config.json").write_text(config)
    assert key_of(changed(wanted, target=open_checkpoint(str(copy))), corpus) == key
    os.utime(copy / "model.safetensors", ns=(1, 1))
    others.append(key_of(changed(wanted, target=open_checkpoint(str(copy))), corpus))
    monkeypatch.setattr(cache, "LAYOUT", cache.LAYOUT + 1)
    others.append(key_of(wanted, corpus))
    assert len({key, *others}) == 1 + len(others)


def test_a_disk_without_room_is_refused(
    tmp_path: Path, target: Checkpoint, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wanted, "bytes_per_token", 1 << 60)
    with pytest.raises(ConfigError, match=r"hidden states take .* GB"):
        next(fill(tmp_path, corpus, wanted_of(target), "cpu"))
