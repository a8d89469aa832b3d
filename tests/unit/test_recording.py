"""Recording files: what is written is read, and what cannot be used is refused by file and field."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.core import ConfigError
from penstock.lab.record import METADATA, Recording, digest, fingerprint
from tests.recordings import DRAFT, TARGET, make_recording


@pytest.fixture(scope="module")
def recording() -> Recording:
    return make_recording((5, 7), top_p=0.9)


@pytest.fixture
def file(recording: Recording, tmp_path: Path) -> Path:
    recording.save(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_what_is_saved_is_loaded(recording: Recording, file: Path) -> None:
    loaded = Recording.load(file)
    assert loaded.header == recording.header
    assert loaded.arrays().keys() == recording.arrays().keys()
    for name, values in recording.arrays().items():
        np.testing.assert_array_equal(loaded.arrays()[name], values)
    assert [loaded.rows(i) for i in range(loaded.requests)] == [slice(0, 5), slice(5, 12)]


def rewrite(file: Path, arrays: dict[str, np.ndarray] | None = None, **header: object) -> None:
    """Change some arrays (None removes one) and fields of the header."""
    changed = {**load_file(file), **(arrays or {})}
    table = {**asdict(Recording.load(file).header), **header}
    kept = {name: values for name, values in changed.items() if values is not None}
    save_file(kept, file, metadata={METADATA: json.dumps(table)})


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"format": 2}, "format is 2; it has to be 1"),
        ({"temperature": "warm"}, "temperature is a string"),
        ({"target": {"name": "x", "config": "y"}}, "target.tokenizer is missing"),
        ({"tempo": 1}, "tempo is unknown"),
        ({"seeds": [1]}, "seeds is 1; it has to be one per request, of 2"),
        ({"vocabulary": 4}, "tokens is 'out of range'; it has to be token ids below 4"),
    ],
)
def test_a_header_that_cannot_be_used_is_refused_by_field(file: Path, header: dict[str, object], words: str) -> None:
    rewrite(file, **header)
    with pytest.raises(ConfigError, match=rf"a\.safetensors: ({words}).*record it again"):
        Recording.load(file)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("chances", None, "chances is missing"),
        ("chances", np.zeros((12, 3), np.float32), r"chances is \[12, 3\]; .*\[T, K\].*with .*K = 24"),
        ("tokens", np.zeros(11, np.int32), "offsets is .* rising from 0 to the number of tokens, 11|token_probs is"),
        ("offsets", np.array([0, 9, 5, 12]), "prompt_lengths is"),
        ("offsets", np.array([0, 13, 12]), "offsets is .* rising"),
        ("offsets", np.zeros(0, np.int64), "offsets is"),
        ("target_probs", np.full((12, 24), np.nan, np.float32), "target_probs is .* between 0 and 1"),
        ("candidates", np.full((12, 24), 24, np.int32), "candidates is .* below 24"),
        ("tokens", np.zeros(12, np.int64), "tokens is 'int64'; it has to be of type int32"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused_by_name(
    file: Path, name: str, values: np.ndarray | None, words: str
) -> None:
    rewrite(file, {name: values})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=rf"a\.safetensors: ({words}).*record it again"):
        Recording.load(file)


def test_a_truncated_file_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"a\.safetensors: is no whole safetensors file"):
        Recording.load(file)


@pytest.mark.parametrize("content", [b"", b"not a recording at all", b'{"settings": {}}'])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"other\.json: is no whole safetensors file"):
        Recording.load(file)


def test_safetensors_of_something_else_are_refused(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors: metadata has no 'penstock_recording'"):
        Recording.load(tmp_path / "model.safetensors")


def test_files_that_cannot_be_read_or_written_are_named(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.safetensors: there is no such file"):
        Recording.load(tmp_path / "none.safetensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording.load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        recording.save(tmp_path / "none" / "a.safetensors")


def test_another_model_or_tokenizer_is_refused_with_both_values(recording: Recording, file: Path) -> None:
    recording.check_made_with(file, TARGET, DRAFT)
    recording.check_made_with(file, replace(TARGET, name="moved"), DRAFT)
    with pytest.raises(ConfigError, match=r"a\.safetensors: target\.config is c0c0.*'target'.*'other'.* d0d0"):
        recording.check_made_with(file, replace(DRAFT, name="other"), DRAFT)
    with pytest.raises(ConfigError, match=r"draft\.tokenizer is f0f0.*'draft' here is abab"):
        recording.check_made_with(file, TARGET, replace(DRAFT, tokenizer="ab" * 32))


def test_a_fingerprint_is_of_config_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    before = fingerprint("x", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert fingerprint("x", tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("[]")
    after = fingerprint("x", tmp_path)
    assert (after.config, after.name) == (before.config, "x")
    assert after.tokenizer != before.tokenizer
    assert digest(tmp_path, ("vocab.json",)) == "none"
