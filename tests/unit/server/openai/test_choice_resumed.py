"""Choices that go on in the middle of a thought or a call, cut after every character."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core import CompletionOutput, FinishReason
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.reply import Choice, ChoiceDelta
from penstock.server.openai.tool_readers import FORMATS, PlainReader, Reader, Thinking, ThinkingReader
from penstock.server.openai.tools import ReplyPlan
from tests.unit.server.openai.test_readers import WRITE, reader_of

THOUGHT = "<think>a thought\nand </thi more</think>\n\nan answer <"
CASES: dict[str, tuple[Callable[[], Reader], str]] = {
    format.name: (lambda format=format: reader_of(format), text)  # type: ignore[misc]
    for format in FORMATS
    for text in [WRITE[format.name]("a", '{"x": 1, "s": "é <"}') + WRITE[format.name]("b", "{}") + "\n<tool"]
}
CASES["thinking"] = (lambda: ThinkingReader(Thinking("<think>", "</think>"), False, PlainReader()), THOUGHT)


class Client:
    """A client of one choice: it has the text, the thought, and the calls without their random ids."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, str] = {}
        self.finish_reason: str | None = None

    def take(self, delta: ChoiceDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            self.calls[call.index] = self.calls.get(call.index, "") + call.name + call.arguments
        self.finish_reason = delta.finish_reason


def push(choice: Choice, client: Client, text: str, *, ended: bool) -> None:
    for place, character in enumerate(text):
        last = ended and place == len(text) - 1
        reason = FinishReason.STOP if last else None
        client.take(choice.push(CompletionDelta(0, [1], character, None, reason)))


@pytest.mark.parametrize("name", CASES)
def test_a_choice_goes_on_behind_any_character(name: str) -> None:
    reader, text = CASES[name]

    def choice() -> Choice:
        return Choice(lambda token: b"", ReplyPlan(reader=reader))

    whole: Any = Client()
    push(choice(), whole, text, ended=True)
    assert whole.calls or whole.reasoning
    for cut in range(len(text) + 1):
        client, resumed = Client(), choice()
        push(choice(), client, text[:cut], ended=cut == len(text))
        resumed.resume(CompletionOutput(0, [1] * cut, text[:cut]))
        if cut == len(text):
            resumed_end = CompletionDelta(0, [], "", None, FinishReason.STOP)
            client.take(resumed.push(resumed_end))
        else:
            push(resumed, client, text[cut:], ended=True)
        assert vars(client) == vars(whole), text[:cut]
