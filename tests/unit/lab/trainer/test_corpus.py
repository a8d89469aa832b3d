"""Files become sequences in which exactly the assistant's tokens are to be learned; bad lines are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.lab.trainer.corpus import Corpus, Document, make_corpus, read_documents
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.training import MARKED, TEMPLATE, write_lines, write_texts

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "3, of course"},
]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], "system"), "value": turn["content"]}
    for turn in TURNS
]


def tokenizer_with(template: str | None, model: Path, folder: Path) -> Tokenizer:
    shutil.copytree(model, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def learned_text(corpus: Corpus, tokenizer: Tokenizer, sample: int = 0) -> str:
    found = corpus.samples[sample]
    return tokenizer.decode(found.tokens_L[found.learned_L].tolist())


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "marked"])
@pytest.mark.parametrize("entry", [{"messages": TURNS}, {"conversations": SHAREGPT}], ids=["messages", "sharegpt"])
def test_of_a_conversation_the_answers_are_learned(tmp_path: Path, model: Path, template: str, entry: object) -> None:
    tokenizer = tokenizer_with(template, model, tmp_path / "model")
    file = write_lines(tmp_path / "chat.jsonl", entry, entry)
    corpus = make_corpus(read_documents([file]), tokenizer, 256)
    assert learned_text(corpus, tokenizer) == "2\n3, of course\n"
    whole = tokenizer.decode(corpus.samples[0].tokens_L.tolist())
    assert whole == "<system>be brief\n<user>two?\n<assistant>2\n<user>three?\n<assistant>3, of course\n"


def test_answers_that_are_rendered_otherwise_later_are_not_learned(tmp_path: Path, model: Path) -> None:
    """Some templates leave out the thoughts of earlier turns."""
    kept = "loop.last or message['role'] != 'assistant'"
    forgetful = TEMPLATE.replace("{{ message['content'] }}", f"{{{{ message['content'] if {kept} else '...' }}}}")
    tokenizer = tokenizer_with(forgetful, model, tmp_path / "model")
    file = write_lines(tmp_path / "chat.jsonl", {"messages": TURNS}, {"messages": TURNS})
    assert learned_text(make_corpus(read_documents([file]), tokenizer, 256), tokenizer) == "3, of course\n"


def test_plain_text_is_learned_whole_and_cut(tmp_path: Path, model: Path) -> None:
    tokenizer = load_tokenizer(model)
    (tmp_path / "texts").mkdir()
    write_lines(tmp_path / "texts" / "a.jsonl", {"text": "y" * 9})
    (tmp_path / "texts" / "b.py").write_text("x" * 25)
    (tmp_path / "texts" / ".hidden").write_text("no")
    corpus = make_corpus(read_documents([tmp_path / "texts"]), tokenizer, 10)
    assert [len(sample) for sample in corpus.samples] == [9, 10, 10, 5]
    assert all(sample.learned_L.all() for sample in corpus.samples)


def test_a_conversation_loses_its_end_and_goes_where_nothing_is_left_to_learn(tmp_path: Path, model: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATE, model, tmp_path / "model")
    late = {"messages": [{"role": "user", "content": "q" * 60}, {"role": "assistant", "content": "a"}]}
    file = write_lines(tmp_path / "chat.jsonl", {"messages": TURNS}, late, {"messages": TURNS})
    corpus = make_corpus(read_documents([file]), tokenizer, 45)
    assert [len(sample) for sample in corpus.samples] == [45, 45]
    assert learned_text(corpus, tokenizer) == "2\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ('{"prompt": "x"}', "needs 'messages' or 'conversations'"),
        ('{"text": ""}', "'text' that is not empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is 'robot'; known: human, user"),
        ({"conversations": [{"from": "human", "value": 3}]}, r"conversations\[0\].value is 3; it has to be text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant's to learn from"),
        ({"messages": ["x"]}, r"messages\[0\].role is None"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    file = write_lines(tmp_path / "bad.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 3: .*{said}"):
        read_documents([file])


def test_files_that_cannot_be_used_are_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file or folder .*nowhere"):
        read_documents([tmp_path / "nowhere"])
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.txt is no UTF-8 text"):
        read_documents([tmp_path / "latin.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no text"):
        read_documents([tmp_path / "empty"])
    chat = write_lines(tmp_path / "chat.jsonl", {"messages": TURNS})
    with pytest.raises(ConfigError, match=r"chat\.jsonl, line 1: the checkpoint has no chat template"):
        make_corpus(read_documents([chat]), load_tokenizer(model), 64)
    (tmp_path / "short.txt").write_text("x" * 20)
    with pytest.raises(ConfigError, match=r"1 sequences .* one has to be held out"):
        make_corpus(read_documents([tmp_path / "short.txt"]), load_tokenizer(model), 64)


def test_whole_documents_are_held_out(tmp_path: Path, model: Path) -> None:
    documents = read_documents([write_texts(tmp_path, 60)])
    corpus = make_corpus(documents, load_tokenizer(model), 50)
    assert sorted([*corpus.training, *corpus.held_out]) == list(range(len(corpus.samples)))
    sides = [{corpus.samples[i].document for i in side} for side in (corpus.training, corpus.held_out)]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[1]) == 2


@pytest.mark.parametrize("text", ["one ", "two ", "three ", "four "])
def test_of_two_documents_the_long_one_is_never_held_out(tmp_path: Path, model: Path, text: str) -> None:
    """Documents are chosen by a hash of their text, hence the several texts."""
    documents = [Document("long", text=text * 200), Document("short", text=text * 20)]
    corpus = make_corpus(documents, load_tokenizer(model), 16)
    assert {corpus.samples[i].document for i in corpus.held_out} == {1}


def test_of_a_single_document_the_end_is_held_out(tmp_path: Path, model: Path) -> None:
    (tmp_path / "one.txt").write_text("x" * 1000)
    corpus = make_corpus(read_documents([tmp_path / "one.txt"]), load_tokenizer(model), 20)
    assert (corpus.training, corpus.held_out) == (list(range(48)), [48, 49])
