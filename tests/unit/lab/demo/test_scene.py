"""Who writes in the demo: the chat model where it can be had, else the shipped pair."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.engine.options import DEMO
from penstock.lab import demo
from penstock.library.download import Unreachable
from penstock.text.tokenizer import load_tokenizer


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def test_a_chat_model_answers_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "place_of", lambda name, console: "cache/small.gguf")
    found = demo.scene_for(console(), embedded=False)
    assert (found.model, found.speculation.method) == ("cache/small.gguf", "ngram")
    assert {one.temperature for one in found.params} == {0.0}
    tokenizer = load_tokenizer(DEMO / "target")
    tokenizer.use_chat_template("user: {{ messages[0].content }}")
    prompts = found.prompts(tokenizer)
    assert [prompt["prompt"] for prompt in prompts] == [f"user: {text}" for text in demo.QUESTIONS]  # type: ignore[index]
    assert [text.strip() for text in found.shown] == list(demo.QUESTIONS)


def test_the_pair_stands_in_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def place_of(name: str, console: Console) -> str:
        raise Unreachable("no registry")

    monkeypatch.setattr(demo, "place_of", place_of)
    screen = console()
    found = demo.scene_for(screen, embedded=False)
    assert (found.model, found.speculation.method, len(found.shown)) == ("demo", "draft_model", demo.PROMPTS)
    assert "no registry. The demo shows the pair" in said(screen)
    assert found.prompts(load_tokenizer(DEMO / "target")) == list(found.shown)


def test_the_pair_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(demo, "place_of")
    screen = console()
    assert demo.scene_for(screen, embedded=True).model == "demo"
    assert said(screen) == ""
