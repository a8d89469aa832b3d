"""A chat's history and settings, and the commands that change them."""

from __future__ import annotations

import pytest

from penstock.clients.chat import COMMANDS, Conversation, Next, run_command
from penstock.core import RequestError


def talked() -> Conversation:
    conversation = Conversation("be brief")
    conversation.ask("a")
    conversation.answer("b")
    return conversation


def test_a_request_carries_all_turns() -> None:
    conversation = talked()
    conversation.ask("c")
    roles = [(message["role"], message["content"]) for message in conversation.body("m")["messages"]]
    assert roles == [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]


def test_without_a_system_prompt_there_is_no_such_message() -> None:
    conversation = Conversation()
    conversation.ask("a")
    assert [message["role"] for message in conversation.body("m")["messages"]] == ["user"]


def test_a_message_that_was_never_answered_makes_room() -> None:
    conversation = talked()
    conversation.ask("lost")
    conversation.ask("c")
    assert [turn["content"] for turn in conversation.turns] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("/set temperature 0.7", {"temperature": 0.7}),
        ('/set stop ["a", "b"]', {"stop": ["a", "b"]}),
        ("/set stop the end", {"stop": "the end"}),
        ("/set  ", {}),
    ],
)
def test_settings(line: str, settings: dict[str, object]) -> None:
    conversation = Conversation()
    assert run_command(line, conversation)[0] is Next.READ
    assert conversation.settings == settings
    assert {name: conversation.body("m")[name] for name in settings} == settings


def test_a_setting_without_value_is_the_servers_again() -> None:
    conversation = Conversation(settings={"temperature": 0.7, "seed": 1})
    assert run_command("/set temperature", conversation)[1] == "seed = 1"
    assert "temperature" not in conversation.body("m")


@pytest.mark.parametrize("name", ["messages", "model", "n", "stream", "stream_options"])
def test_fields_that_the_client_itself_needs(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is not to be set"):
        run_command(f"/set {name} 2", Conversation())


def test_system_clear_and_regenerate() -> None:
    conversation = talked()
    assert run_command("/regenerate", conversation) == (Next.ANSWER, "")
    assert [turn["content"] for turn in conversation.turns] == ["a"]
    run_command("/system speak up", conversation)
    run_command("/clear", conversation)
    assert (conversation.system, conversation.turns) == ("speak up", [])
    run_command("/system", conversation)
    assert conversation.system == ""
    with pytest.raises(RequestError, match="nothing to answer"):
        run_command("/regenerate", conversation)


def test_a_greedy_answer_that_would_be_the_same_says_so() -> None:
    conversation = Conversation(defaults={"temperature": 0.0})
    assert conversation.sampling == "temperature 0"
    conversation.ask("a")
    assert "/set temperature 0.7" in run_command("/regenerate", conversation)[1]
    run_command("/set temperature 0.7", conversation)
    assert run_command("/regenerate", conversation) == (Next.ANSWER, "")


@pytest.mark.parametrize("word", ["/bye", "/quit"])
def test_leaving(word: str) -> None:
    assert run_command(word, Conversation())[0] is Next.LEAVE


def test_help() -> None:
    words = run_command("/help", Conversation())[1]
    assert all(f"/{name}" in words for name in COMMANDS)


def test_an_unknown_command_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'regenerate'"):
        run_command("/regnerate", Conversation())


def test_the_servers_sampling_for_chats_is_sent_and_said_until_it_is_set() -> None:
    conversation = Conversation(defaults={"temperature": 0.8, "top_k": 40})
    conversation.ask("a")
    assert conversation.sampling == "temperature 0.8, top_k 40"
    assert run_command("/set", conversation)[1] == "all others are the server's defaults (temperature 0.8, top_k 40)"
    run_command("/set temperature 0", conversation)
    body = conversation.body("m")
    assert (body["temperature"], body["top_k"]) == (0, 40)
    assert conversation.sampling == "temperature 0, top_k 40"
    assert run_command("/set", conversation)[1].splitlines()[0] == "temperature = 0"
