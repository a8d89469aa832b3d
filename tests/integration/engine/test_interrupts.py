"""Ctrl-C at many moments in a program that uses ``LLM``, and in our own commands: no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.processes import descendants
from tests.serving import PATIENCE, PENSTOCK, until
from tests.warm import popen

pytestmark = pytest.mark.processes

PROGRAM: Final = """
import sys
from penstock import LLM, SamplingParams

def say(word):
    print(word, flush=True)

say("imported")
with LLM("demo", pipeline_parallel_size=2, max_model_len=256) as llm:
    say("started")
    long = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    while sys.argv[1] == "generate":
        llm.generate(["def f(", "class A:"], long)
        say("answered")
    for _ in llm.stream("def f(", SamplingParams(max_tokens=200, ignore_eos=True)):
        say("text")
    while True:
        pass
"""


class Program:
    """The program as a process of its own, with its output line by line.

    Its processes are known by their standard error, which all inherit, also once their parent has ended.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        self._mark = mark_of(process.stderr.fileno())

    def says(self, word: str, times: int = 1) -> None:
        """Wait until it has said a word so many times."""
        assert self.process.stdout is not None
        while times:
            line = self.process.stdout.readline()
            assert line, "it has ended"
            times -= line.strip() == word

    def has_been_starting(self, seconds: float) -> None:
        self.says("imported")
        time.sleep(seconds)

    def has_children(self, count: int) -> None:
        """Wait until it has so many processes below it, however slow this machine is."""
        while len(descendants(self.process.pid)) < count:
            assert self.process.poll() is None, "it has ended"
            time.sleep(0.01)

    @property
    def left(self) -> list[int]:
        """Processes that carry the mark, and have not ended."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark_of(place / "fd" / "2") == self._mark:
                    found.append(int(place.name))
        return found


def mark_of(file: int | Path) -> tuple[int, int]:
    """The pipe that a descriptor is an end of."""
    told = os.stat(file)
    return told.st_dev, told.st_ino


@contextmanager
def program(*command: str, begin: Callable[..., subprocess.Popen[str]] = subprocess.Popen) -> Iterator[Program]:
    with begin(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts a program in the background has it ignore SIGINT, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        one = Program(process)
        try:
            yield one
        finally:
            process.kill()
            for pid in one.left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


MOMENTS: Final[dict[str, tuple[str, Callable[[Program], None]]]] = {
    "0.3 s into the start": ("generate", lambda one: one.has_been_starting(0.3)),
    "with a first process": ("generate", lambda one: one.has_children(1)),
    "with a drafter": ("generate", lambda one: one.has_children(2)),
    "with a first stage": ("generate", lambda one: one.has_children(3)),
    "with all stages": ("generate", lambda one: one.has_children(4)),
    "once started": ("generate", lambda one: one.says("started")),
    "amid a third answer": ("generate", lambda one: one.says("answered", 2)),
    "amid a stream": ("stream", lambda one: one.says("text", 5)),
}


SAMPLE: Final = ("with a first stage",)
"""While processes start; amid answers, such a program is interrupted by test_processes.py, too. The other moments run
with the whole matrices. By then all is imported, so that this one begins with that done (``tests/warm.py``)."""


@pytest.mark.parametrize(
    "moment", [pytest.param(one, marks=[pytest.mark.whole] * (one not in SAMPLE)) for one in MOMENTS]
)
def test_an_interrupted_program_ends_as_any_other_and_leaves_no_process(moment: str) -> None:
    does, wait = MOMENTS[moment]
    with program(sys.executable, "-c", PROGRAM, does, begin=popen if moment in SAMPLE else subprocess.Popen) as one:
        wait(one)
        one.process.send_signal(signal.SIGINT)
        _, said = one.process.communicate(timeout=PATIENCE)
        assert one.process.returncode == -signal.SIGINT, said
        assert said.splitlines()[-1] == "KeyboardInterrupt"
        # Python tells of a folder that its cache of importers lacked, too, where that import was interrupted.
        missed = said.count("in _path_importer_cache\nKeyError: ")
        assert said.count("Traceback (most recent call last)") == 1 + missed, said
        until(lambda: one.left == [])


COMMANDS: Final = {
    "generate": ("generate", "x", "--model", "demo", "-pp", "2"),
    "serve": ("serve", "demo", "--port", "0", "-pp", "2"),
}
COMMAND: Final = ("serve", 3)
"""The sample: the command that has the most to end (a server beside its engine), amid the start of its stages. All is
imported by then, too."""


@pytest.mark.parametrize(
    ("name", "children"),
    [
        pytest.param(name, count, marks=[pytest.mark.whole] * ((name, count) != COMMAND))
        for name in COMMANDS
        for count in (1, 2, 3, 4)
    ],
)
def test_a_command_that_is_interrupted_as_it_starts_says_nothing_and_leaves_no_process(
    name: str, children: int
) -> None:
    with program(PENSTOCK, *COMMANDS[name], begin=popen if (name, children) == COMMAND else subprocess.Popen) as one:
        one.has_children(children)
        one.process.send_signal(signal.SIGINT)
        _, said = one.process.communicate(timeout=PATIENCE)
        assert (one.process.returncode, "Traceback" in said) == (130, False), said
        until(lambda: one.left == [])
