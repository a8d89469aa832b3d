"""Conversations and templates from files, and what is said of files that hold neither."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core import ConfigError
from penstock.text.chat import Conversation, read_conversation, read_template

TALK = [{"role": "user", "content": "turn the wheel"}]


def written(folder: Path, content: Any) -> Path:
    file = folder / "talk.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_list_of_messages_or_the_body_of_a_request(tmp_path: Path) -> None:
    assert read_conversation(written(tmp_path, TALK)) == Conversation(messages=TALK)
    body = {"messages": TALK, "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}}
    assert read_conversation(written(tmp_path, body)) == Conversation(**body)


def test_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(TALK)))
    assert read_conversation(Path("-")).messages == TALK


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ({"turns": ["a"]}, "or an object with the field messages"),
        ("3", "or an object with the field messages"),
        ({"messages": TALK, "temperature": 0}, "temperature is no part of a conversation"),
        ({"messages": []}, "at least one"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ({"messages": TALK, "tools": "x"}, "tools has to be a list"),
        ({"messages": TALK, "chat_template_kwargs": 1}, "chat_template_kwargs has to be an object"),
    ],
)
def test_a_file_that_holds_no_conversation_is_named(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"messages: .*talk.json.*{said}"):
        read_conversation(written(tmp_path, content))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"messages: .*none\.json cannot be read"):
        read_conversation(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"chat_template is .*none\.jinja"):
        read_template(tmp_path / "none.jinja")
