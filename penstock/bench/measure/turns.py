"""Turns the conversations of a prompt set into requests: each prompt holds the earlier turns and answers.

  turns     "Write a poem."      "Make it shorter."
  requests  [poem]               [poem] [plain decoding's answer] [shorter]

The answers are those of plain decoding, so that every strategy is asked the same. They are decoded before anything is
measured: first turns of all conversations together, then second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.bench.grid import Conversation, Question, check_lengths
from penstock.bench.measure.decode import decode
from penstock.text.chat import ChatFormat, chat_prompt

if TYPE_CHECKING:
    from penstock.engine.llm import LLM


def questions_of(llm: LLM, conversations: Sequence[Conversation], raw: bool) -> list[Question]:
    """Every turn's request, conversation after conversation; only first turns if ``raw`` or the model has no chat
    format.

    Raises FieldError for a request that does not fit.
    """
    if not is_chat(llm, raw):
        found = [conversation.opening for conversation in conversations]
        check_lengths(llm, found)
        return found
    talks = [Talk(conversation) for conversation in conversations]
    while asking := [talk for talk in talks if talk.goes_on]:
        for talk in asking:
            talk.ask(llm)
        latest = [talk.questions[-1] for talk in asking]
        check_lengths(llm, latest)
        if going_on := [talk for talk in asking if talk.goes_on]:
            answer(going_on, llm)
    return [question for talk in talks for question in talk.questions]


def is_chat(llm: LLM, raw: bool) -> bool:
    return not raw and llm.get_tokenizer().is_of_chat


class Talk:
    """One conversation with the questions so far."""

    def __init__(self, conversation: Conversation) -> None:
        self.questions: list[Question] = []
        self.messages: list[dict[str, str]] = []
        self._conversation = conversation

    @property
    def goes_on(self) -> bool:
        """Whether the user has another turn."""
        return len(self.questions) < len(self._conversation.turns)

    def ask(self, llm: LLM) -> None:
        """Add the user's next turn as a question."""
        turn = len(self.questions)
        self.messages.append({"role": "user", "content": self._conversation.turns[turn]})
        prompt = chat_prompt(llm.get_tokenizer(), self.messages, ChatFormat())
        self.questions.append(self._conversation.question(turn, prompt))


def answer(talks: Sequence[Talk], llm: LLM) -> None:
    """Have plain decoding answer the latest question of each conversation, all together."""
    asked = [talk.questions[-1] for talk in talks]
    outputs = decode(llm, [one.prompt for one in asked], [one.params for one in asked], None)
    for talk, output in zip(talks, outputs, strict=True):
        talk.messages.append({"role": "assistant", "content": output.outputs[0].text})
