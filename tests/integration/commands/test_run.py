"""``penstock run`` as a user has it: in a terminal, and in a pipe."""

from __future__ import annotations

import psutil
import pytest

from tests.processes import descendants
from tests.terminals import PATIENCE, PENSTOCK, READY, terminal
from tests.warm import run

pytestmark = pytest.mark.processes


def test_a_person_stops_an_answer_and_leaves_nothing_behind() -> None:
    with terminal("run", "demo", "-pp", "2") as chat:
        shown = chat.until(READY)
        assert "demo is no chat model" in shown
        assert "16 layers in float32, exact numerics, 2 stages" in shown
        assert "type a message" in shown
        family = descendants(chat.process.pid)
        chat.type("/set temperature 0\r")  # a sampled answer may be over before anybody can stop it
        chat.until(READY)
        chat.type("def fibonacci(n):\r")
        chat.until("def fibonacci(n):")  # what was typed comes back first, and is not the answer
        chat.until("\n")
        chat.until("e")
        chat.type("\x03")
        chat.until("stopped")
        chat.until(READY)
        chat.type("/set max_tokens 4\r")
        chat.until(READY)
        chat.type("class Stack:\r")
        chat.until("4 tokens")
        chat.until(READY)
        chat.type("/bye\r")
        assert chat.process.wait(PATIENCE) == 0
    _, alive = psutil.wait_procs(family, PATIENCE)
    assert alive == []


def test_a_pipe_gets_the_answers_alone() -> None:
    lines = "/set max_tokens 4\nclass Stack:\n"
    result = run([PENSTOCK, "run", "demo"], lines)
    said = [line for line in result.stderr.splitlines() if not line.startswith("starting: ")]  # on a busy host
    assert (result.returncode, said) == (0, [])
    assert result.stdout.endswith("\n")
    assert result.stdout.strip()
