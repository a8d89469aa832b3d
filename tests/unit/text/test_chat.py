"""Conversations as prompts: what a template is given, and what is refused before it sees anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core import RequestError
from penstock.text.chat import ChatFormat, chat_prompt, chat_sampling, conversations_of, turns_of
from penstock.text.tokenizer import Tokenizer
from tests.unit.text.conftest import byte_level

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ': ' + m.content }}\n{% endfor %}"
    "{% for tool in tools or () %}[{{ tool.function.name }}]{% endfor %}{{ mood }}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TALK = [{"role": "user", "content": "turn the wheel"}]


@pytest.fixture
def tokenizer() -> Tokenizer:
    found = byte_level()
    found.use_chat_template(TEMPLATE)
    return found


def test_a_conversation_becomes_text_and_the_tokens_of_that_text(tokenizer: Tokenizer) -> None:
    prompt = chat_prompt(tokenizer, TALK, ChatFormat())
    assert prompt["prompt"] == "<s>user: turn the wheel\n<s>assistant: "
    assert prompt["prompt_token_ids"] == tokenizer.encode(prompt["prompt"], add_special_tokens=False)


def test_the_template_has_tools_and_variables(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "open"}}]
    chat = ChatFormat(tools=tools, chat_template_kwargs={"mood": "calm "}, add_generation_prompt=False)
    assert chat_prompt(tokenizer, TALK, chat)["prompt"] == "<s>user: turn the wheel\n[open]calm "


def test_the_last_message_can_be_left_open(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(add_generation_prompt=False, continue_final_message=True)
    messages = [*TALK, {"role": "assistant", "content": "It turns"}]
    assert chat_prompt(tokenizer, messages, chat)["prompt"].endswith("<s>assistant: It turns")
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        ChatFormat(continue_final_message=True)


def test_what_a_message_holds_is_text(tokenizer: Tokenizer) -> None:
    """A user who writes a special token's name has not ended the turn."""
    end = tokenizer.eos_token_ids[0]
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": "what is </s>?"}], ChatFormat())
    assert prompt["prompt"] == "<s>user: what is </s>?\n<s>assistant: "
    assert end not in prompt["prompt_token_ids"]


def test_a_template_of_ones_own_replaces_the_checkpoints(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(chat_template="{{ messages[0].content }}!")
    assert chat_prompt(tokenizer, TALK, chat)["prompt"] == "turn the wheel!"
    assert chat_prompt(byte_level(), TALK, chat)["prompt"] == "turn the wheel!"
    with pytest.raises(RequestError, match="none: give one"):
        chat_prompt(byte_level(), TALK, ChatFormat())
    with pytest.raises(RequestError, match="is not a Jinja template"):
        chat_prompt(tokenizer, TALK, ChatFormat(chat_template="{% if %}"))


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        (TEMPLATE, True),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}", False),
        ("{{ raise_exception('wants a system message') }}", True),
    ],
)
def test_a_chat_model_has_a_template_that_writes_something(template: str, chat: bool) -> None:
    tokenizer = byte_level()
    assert not tokenizer.is_of_chat
    tokenizer.use_chat_template(template)
    assert tokenizer.is_of_chat is chat


def test_messages_are_as_the_api_has_them() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert turns_of([parts, {"role": "assistant", "content": None, "tool_calls": [call]}]) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
    ]
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}, "what the user holds stays"


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "messages is 'hello'"),
        ([], "at least one"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"content": "x"}], r"messages\[0\] is"),
        ([*TALK, {"role": "user"}], r"messages\[1\].content is missing"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content has to be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content has to be text"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], r"tool_calls\[0\].function is missing"),
    ],
)
def test_what_is_no_message_is_refused_by_its_place(messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        turns_of(messages)


CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}({{ c.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}"
)
ITEMS = CALLS.replace("c.function.arguments | tojson", "c.function.arguments.items() | list")


@pytest.mark.parametrize(
    "written",
    [
        '{\n  "city',
        "[1]",
        "no JSON",
        '{"a": "\\ud83d"}',
        '{"a": NaN}',
        '{"a": 1e999}',
        f'{{"a": {"1" * 5000}}}',
        "[" * 9999,
    ],
)
def test_arguments_that_a_model_has_not_ended_are_text_or_none(tokenizer: Tokenizer, written: str) -> None:
    """A server takes back what it has written, whatever the template does with it."""
    talk = [*TALK, called(written)]
    as_text = chat_prompt(tokenizer, talk, ChatFormat(chat_template=CALLS))["prompt"]
    assert json.loads(as_text.removeprefix(TALK[0]["content"])[1:-1]) == written
    assert chat_prompt(tokenizer, talk, ChatFormat(chat_template=ITEMS))["prompt"].endswith("([])")


def test_a_turn_of_the_assistant_or_of_a_tool_may_say_nothing() -> None:
    assert turns_of([{"role": "assistant", "content": None}])[0]["content"] == ""
    assert turns_of([{"role": "tool", "content": None, "tool_call_id": "1"}])[0]["content"] == ""


def test_one_conversation_or_several() -> None:
    assert conversations_of(TALK) == [TALK]
    assert conversations_of([TALK, TALK]) == [TALK, TALK]
    for bad in ("hello", [], None):
        with pytest.raises(RequestError, match="list of messages"):
            conversations_of(bad)


def test_a_checkpoint_that_recommends_nothing_is_sampled_as_llama_cpp_does() -> None:
    assert chat_sampling({}) == {"temperature": 0.0}
    assert chat_sampling({"temperature": 1.0}) == {"temperature": 1.0}
