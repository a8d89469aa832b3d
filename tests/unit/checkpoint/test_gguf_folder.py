"""Configuration, tokenizer and chat template of a file, where whoever opens a checkpoint's folder finds them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint import gguf as folder_module
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf import folder_of
from penstock.checkpoint.gguf_header import read_header
from penstock.core import ConfigError
from penstock.text.grammar import load_grammar_tokenizer
from penstock.text.tokenizer import load_tokenizer
from tests.gguf_files import TOKENS, make_gguf
from tests.gguf_tokenizers import Words, sentencepiece_words, write_file

pytestmark = pytest.mark.usefixtures("cache")

TEXTS = ("a text that the th is in", "  two spaces, é, 日本語\n", "</s> is <pad>", "")


def test_it_holds_what_a_checkpoints_folder_does(tmp_path: Path) -> None:
    folder = folder_of(read_header(make_gguf(tmp_path)))
    assert sorted(file.name for file in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1


def test_the_chat_template_is_the_files(tmp_path: Path) -> None:
    found = load_tokenizer(open_checkpoint(str(make_gguf(tmp_path))).path)
    for text in TEXTS:
        assert found.decode(found.encode(text)) == text.replace("</s>", "").replace("<pad>", "")
    assert TOKENS.index("th") in found.encode("the")
    assert found.encode("</s>", add_special_tokens=False) == [1]
    assert found.render([{"role": "user", "content": "hi"}], True) == "<s>user: hi</s><s>assistant:"


def test_grammars_find_their_tokens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_gguf(tmp_path)))
    load_grammar_tokenizer(checkpoint.path, checkpoint.vocab_size, checkpoint.eos_token_ids)


def test_a_text_ends_with_any_of_the_files_ends(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    assert open_checkpoint(str(make_gguf(tmp_path, entries=ends))).eos_token_ids == (1, 5, 7)


def test_an_end_is_in_the_vocabulary(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, entries={"tokenizer.ggml.eot_token_id": len(TOKENS)})
    with pytest.raises(
        ConfigError, match=rf"ggml\.eot_token_id is {len(TOKENS)}; the vocabulary has {len(TOKENS)} tokens"
    ):
        open_checkpoint(str(path))


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path)
    made = folder_of(read_header(path))
    monkeypatch.setattr(folder_module, "make", lambda *_: pytest.fail("it was made again"))
    os.utime(path, (0, 0))
    assert folder_of(read_header(path.rename(tmp_path / "moved.gguf"))) == made


def test_another_header_has_another_folder(tmp_path: Path) -> None:
    folders = [folder_of(read_header(make_gguf(tmp_path / str(seed), seed=seed))) for seed in (0, 1)]
    assert folders[0] == folders[1]
    other = make_gguf(tmp_path / "other", entries={"tokenizer.ggml.eot_token_id": 7})
    assert folder_of(read_header(other)) not in folders


def test_two_may_make_it_at_the_same_time(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(make_gguf(tmp_path))
    make, made = folder_module.config_table, []

    def meanwhile(header: Any) -> dict[str, Any]:
        table = make(header)
        if not made:
            made.append(True)
            folder_of(header)
        return table

    monkeypatch.setattr(folder_module, "config_table", meanwhile)
    assert folder_of(header).is_dir()
    assert [file.name for file in cache.iterdir()] == [folder_of(header).name]


def test_nothing_is_left_of_what_could_not_be_made(tmp_path: Path, cache: Path) -> None:
    path = make_gguf(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modem"))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model is null; gpt2 and llama can be read"):
        open_checkpoint(str(path))
    assert list(cache.iterdir()) == []


def counts(path: Path) -> list[str]:
    """The entries about the model that are numbers of 32 bits."""
    header = read_header(path)
    return [key for key in header.entries if key.startswith("llama.") and type(header.value(key)) is int]


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**32 - 1])
def test_a_file_that_is_refused_leaves_no_folder_whichever_count_is_wrong(
    tmp_path: Path, cache: Path, value: int
) -> None:
    path = make_gguf(tmp_path)
    whole, refused, named, left = path.read_bytes(), [], [], list[Path]()
    for key in counts(path):
        start = whole.index(key.encode()) + len(key) + 4
        path.write_bytes(whole[:start] + value.to_bytes(4, "little") + whole[start + 4 :])
        try:
            open_checkpoint(str(path))
        except ConfigError as error:
            refused.append(key)
            named.append(str(path) in str(error))
            left += list(cache.iterdir())
        for folder in cache.iterdir():
            shutil.rmtree(folder)
    assert len(refused) >= 3
    assert all(named)
    assert left == []


def test_a_file_without_layers_is_refused_by_its_entry(tmp_path: Path, cache: Path) -> None:
    path = make_gguf(tmp_path)
    entry = b"llama.block_count" + (4).to_bytes(4, "little")
    layers = read_header(path).value("llama.block_count")
    path.write_bytes(path.read_bytes().replace(entry + layers.to_bytes(4, "little"), entry + bytes(4)))
    with pytest.raises(ConfigError, match=rf"{path}.*llama\.block_count is 0; the file has {layers} layers"):
        open_checkpoint(str(path))
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_to_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path)
    (tmp_path / "blocked").write_text("")
    monkeypatch.setattr(folder_module, "cached_assets_path", lambda *_: tmp_path / "blocked")
    with pytest.raises(ConfigError, match=r"its tokenizer cannot be kept: .* set HF_ASSETS_CACHE to a folder"):
        open_checkpoint(str(path))


def test_long_tokens_without_merges_are_refused(tmp_path: Path) -> None:
    words = sentencepiece_words()
    longest = [letter * 5000 for letter in "xy"]
    more = Words([*words.tokens, *longest], [*words.kinds, 1, 1], [], [*words.scores, -5000.0, -5001.0])
    with pytest.raises(ConfigError, match=r"tokens could be cut in \d+ ways; without merges"):
        folder_of(read_header(write_file(tmp_path / "x.gguf", more, model="llama")))


def test_every_token_has_a_row_of_the_embedding(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, vocab_size=len(TOKENS) - 1)
    with pytest.raises(ConfigError, match=rf"are {len(TOKENS)}, and token_embd\.weight has {len(TOKENS) - 1} rows"):
        open_checkpoint(str(path))
