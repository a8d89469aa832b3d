"""Tokenizers from anybody: what could make too much of a text is refused when the file is opened, by file and field."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core import ConfigError
from penstock.engine.options import DEMO
from penstock.text.tokenizer import load_tokenizer
from penstock.text.tokenizer_bounds import MOST_ADDED, MOST_GROWTH

Change = Callable[[dict[str, Any]], object]


def replace(text: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: text}, "content": content}


def sequence(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def precompiled(text: bytes) -> dict[str, Any]:
    table = (4).to_bytes(4, "little") + bytes(4) + b"\0" + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **flags}


def around(count: int, ids: int) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}] * count + [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"x": {"id": "x", "ids": [1] * ids, "tokens": ["x"] * ids}}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens}


DOUBLING = [replace("a", "aa")] * 40
SETS: dict[str, tuple[str, str, Any]] = {
    "a million": ("normalizer", "normalizer", replace("a", "z" * 10**6)),
    "a million by a regex": ("normalizer", "normalizer", replace("a", "z" * 10**6, "Regex")),
    "between characters": ("normalizer", "normalizer", replace("", "z" * 10**6, "Regex")),
    "forty that double": ("normalizer", "normalizer.normalizers[8]", sequence("normalizers", *DOUBLING)),
    "nested": (
        "normalizer",
        "normalizer.normalizers[0].normalizers[1]",
        sequence("normalizers", sequence("normalizers", replace("a", "b" * 99), replace("b", "c" * 99))),
    ),
    "a table": ("normalizer", "normalizer", precompiled(b"z" * 10**6)),
    "a prefix": ("normalizer", "normalizer.prepend", {"type": "Prepend", "prepend": "z" * 10**6}),
    "decoder": ("decoder", "decoder", replace("a", "z" * 10**6)),
    "decoders that double": ("decoder", "decoder.decoders[", sequence("decoders", *DOUBLING)),
    "a decoder's suffix": ("decoder", "decoder.suffix", {"type": "BPEDecoder", "suffix": "z" * 10**6}),
    "tokens around": ("post_processor", "post_processor", around(10**5, 1)),
    "ids around": ("post_processor", "post_processor", around(1, 10**5)),
    "processors around": (
        "post_processor",
        "post_processor.processors[2]",
        sequence("processors", *[around(100, 1)] * 9),
    ),
    "a word's suffix": ("model.end_of_word_suffix", "model.end_of_word_suffix", "z" * 10**6),
    "a word's prefix": ("model.continuing_subword_prefix", "model.continuing_subword_prefix", "z" * 10**6),
    "many added tokens": ("added_tokens", "added_tokens", [added(i, f"<{i}>") for i in range(MOST_ADDED + 1)]),
    "a long added token": ("added_tokens", "added_tokens", [added(4000, "z" * 10**6)]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO / "target", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change(file: Path, field: str, value: Any) -> None:
    table = json.loads(file.read_text())
    *way, name = field.split(".")
    inner = table
    for step in way:
        inner = inner[step]
    inner[name] = value
    file.write_text(json.dumps(table))


@pytest.mark.parametrize("case", list(SETS))
def test_what_makes_too_much_is_refused_by_its_field(folder: Path, case: str) -> None:
    field, named, value = SETS[case]
    change(folder / "tokenizer.json", field, value)
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(folder)
    assert str(refused.value).startswith(f"model: {folder}/tokenizer.json: {named}")
    assert len(str(refused.value)) < 600


def test_a_long_token_of_the_vocabulary_is_refused(folder: Path) -> None:
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"]["z" * 10**6] = len(table["model"]["vocab"]) + len(table["added_tokens"])
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: model\.vocab holds a token of 1000000 characters"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {str(i): {"content": f"<{i}>"} for i in range(200_000)}}),
        ("tokenizer_config.json", {"additional_special_tokens": [f"<{i}>" for i in range(200_000)]}),
        ("tokenizer_config.json", {"extra_special_tokens": {f"t{i}": f"<{i}>" for i in range(200_000)}}),
        ("special_tokens_map.json", {"additional_special_tokens": [f"<{i}>" for i in range(200_000)]}),
        ("added_tokens.json", {f"<{i}>": 4096 + i for i in range(200_000)}),
    ],
)
def test_added_tokens_are_counted_in_every_file(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{name}: .* holds 200000 tokens; there may be at most {MOST_ADDED}"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model": 7}', '{"added_tokens":' + "[" * 2000])
def test_what_is_no_tokenizer_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer's"):
        load_tokenizer(folder)


def test_a_file_of_any_size_is_refused_unread(folder: Path) -> None:
    with (folder / "tokenizer.json").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is 1099511627776 bytes large"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        sequence(
            "normalizers", replace("``", '"'), {"type": "NFKD"}, {"type": "Lowercase"}, replace(" {2,}", " ", "Regex")
        ),
        replace("a", "b" * MOST_GROWTH),
    ],
)
def test_usual_ones_are_taken_and_stay_within_the_limits(folder: Path, normalizer: Any) -> None:
    change(folder / "tokenizer.json", "normalizer", normalizer)
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("a" * 1000)) <= 1000 * MOST_GROWTH
