"""``penstock chat`` as a user runs it: in a terminal, and in a pipe.

Commands are forks (``tests/warm.py``), but for one in a pipe and one in a terminal.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from penstock.cli.options import INTERRUPTED
from tests.openai_server import OpenAIServer, Reply, prompt_of, running
from tests.terminals import PATIENCE, PENSTOCK, READY, Terminal, terminal
from tests.warm import Warm, run

pytestmark = pytest.mark.processes


def piped(url: str, lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return run([PENSTOCK, "chat", "--url", url, *flags], lines)


def echo(body: dict[str, Any]) -> Reply:
    return Reply(pieces=("**re:** ", prompt_of(body)))


def test_a_pipe_gets_plain_answers_line_by_line() -> None:
    with running(OpenAIServer(echo)) as server:
        command = [PENSTOCK, "chat", "--url", server.url, "--system-prompt", "be brief"]
        lines = 'first\n\n/set temperature 0.5\n"""\ntwo\nlines\n"""\n'
        result = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.stdout == "**re:** first\n**re:** two\nlines\n"
    assert (result.stderr, result.returncode) == ("", 0)
    last = server.bodies[-1]
    assert [message["role"] for message in last["messages"]] == ["system", "user", "assistant", "user"]
    assert (last["messages"][2]["content"], last["temperature"]) == ("**re:** first", 0.5)
    assert last["model"] == "scripted"


def test_a_pipe_may_leave_and_go_back() -> None:
    with running(OpenAIServer(echo)) as server:
        result = piped(server.url, "a\n/regenerate\n/clear\nb\n/quit\nnever\n", "--model", "m")
    assert result.stdout == "**re:** a\n**re:** a\n**re:** b\n"
    assert [len(body["messages"]) for body in server.bodies] == [1, 1, 1]
    assert server.bodies[0]["model"] == "m"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(status=400), "the server answers 400: refused: 400"),
        (Reply(end="error"), "the server ended the answer: the engine was lost"),
        (Reply(end="break"), "the server closed the stream before the answer was finished"),
    ],
)
def test_a_pipe_ends_with_the_first_refusal(reply: Reply, words: str) -> None:
    with running(OpenAIServer(lambda body: reply)) as server:
        result = piped(server.url, "a\nb\n")
    assert result.returncode == 1
    assert result.stderr == f"penstock: error: {words}\n"
    assert len(server.bodies) == 1


def test_no_server_says_how_to_start_one() -> None:
    result = piped("http://127.0.0.1:9", "a\n")
    assert result.returncode == 1
    assert "no server answers at http://127.0.0.1:9/v1" in result.stderr
    assert "penstock serve MODEL" in result.stderr


def chatting(url: str, begin: Callable[..., subprocess.Popen[Any]] = Warm) -> AbstractContextManager[Terminal]:
    return terminal("chat", "--url", url, popen=begin)


def test_a_terminal_shows_markdown_and_what_it_cost() -> None:
    reply = Reply(("**bo", "ld** [b]"), 9, accepted=3, rejected=1)
    with running(OpenAIServer(lambda body: reply)) as server, chatting(server.url, subprocess.Popen) as chat:
        chat.until("scripted · type a message · /help shows the commands")
        chat.until(READY)
        chat.type("hello\r")
        shown = chat.until("3 tokens had been drafted")
        assert "bold [b]" in shown
        assert "**bold" not in shown
        assert "9 tokens" in shown
        chat.until(READY)
        chat.type("/set stream 1\r")
        chat.until("stream is not to be set here")
        chat.until(READY)
        chat.type("/quit\r")
        assert chat.process.wait(PATIENCE) == 0


def test_a_terminal_shows_source_code_line_by_line() -> None:
    reply = Reply(("\n# halves\ndef half(x, **more):\n", "    # of x\n    return x / 2\n"), 9)
    with running(OpenAIServer(lambda body: reply)) as server, chatting(server.url) as chat:
        chat.until(READY)
        chat.type("hello\r")
        shown = chat.until("9 tokens").replace("\r", "")
        assert shown.removesuffix("9 tokens").endswith("# halves\ndef half(x, **more):\n    # of x\n    return x / 2\n")


def test_a_paste_of_several_lines_is_one_message() -> None:
    with running(OpenAIServer(echo)) as server, chatting(server.url) as chat:
        chat.until(READY)
        chat.type("\x1b[200~two\nlines\x1b[201~\r")
        chat.until("7 tokens")
        chat.until(READY)
        chat.type("\x1b[200~/set seed 4\n\x1b[201~\r")
        chat.until("seed = 4")
        chat.until(READY)
        chat.type("a\x1b\rb\r")  # Alt-Enter
        chat.until("7 tokens")
    assert [prompt_of(body) for body in server.bodies] == ["two\nlines", "a\nb"]


def test_a_cut_answer_says_so_and_the_gain_is_explained_once() -> None:
    with running(OpenAIServer(lambda body: Reply(speed_up=1.84))) as server:
        server.card |= {"max_model_len": 100, "numerics": "exact"}
        with chatting(server.url) as chat:
            chat.until(READY)
            chat.type("hello\r")
            shown = " ".join(chat.until("token for token.").split())
            assert "the text is the one that plain decoding gives, token for token." in shown
            assert "1.8 times plain" in shown
            assert "cut at 7 tokens; ask it to go on, or /set max_tokens" in shown
            chat.until(READY)
            server.answer = lambda body: Reply(tokens=93, speed_up=2.0)
            chat.type("more\r")
            shown = chat.until("the context is full: 100 tokens; /clear begins anew")
            assert "2.0 times plain" in shown
            chat.until(READY)
            server.answer = lambda body: Reply(finish_reason="stop", speed_up=2.0)
            chat.type("/clear\r")
            chat.until("conversation cleared")
            chat.type("again\r")
            shown += chat.until("2.0 times plain") + chat.until(READY)
            assert "token for token" not in shown
            assert "cut at" not in shown


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves() -> None:
    with running(OpenAIServer(lambda body: Reply(("begun",), end="hold"))) as server, chatting(server.url) as chat:
        chat.until(READY)
        chat.type("tell me\r")
        chat.until("begun")
        chat.type("\x03")
        chat.until("stopped")
        assert server.left.wait(PATIENCE)
        server.answer = lambda body: Reply(("again",))
        chat.until(READY)
        chat.type("go on\r")
        chat.until("7 tokens")
        assert [turn["content"] for turn in server.bodies[-1]["messages"]] == ["tell me", "begun", "go on"]
        chat.until(READY)
        assert chat.press_until_it_ends("\x03") == INTERRUPTED


def test_a_refusal_does_not_end_a_person_s_chat() -> None:
    with running(OpenAIServer(lambda body: Reply(status=429))) as server, chatting(server.url) as chat:
        chat.until(READY)
        chat.type("hello\r")
        chat.until("the server answers 429: refused: 429")
        server.answer = lambda body: Reply(("hi",))
        chat.until(READY)
        chat.type("/regenerate\r")
        chat.until("7 tokens")
        assert [turn["content"] for turn in server.bodies[-1]["messages"]] == ["hello"]
        chat.until(READY)
        chat.type("\x04")
        assert chat.process.wait(PATIENCE) == 0
