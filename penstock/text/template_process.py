"""Chat templates rendered in processes of their own.

A template is a program of whoever made the checkpoint, and clients set its variables. In a process it can be ended:
the kernel does that when its time is up, whatever it is doing, and bounds its memory.

      server --stdin: {"chat_template": ..., "conversations": [...], ...}--> template process
             <-stdout: {"text": ...} or {"refused": ...}-------------------

The process ends with the server: its standard input is then closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Final

from penstock.api_keys import without_api_keys
from penstock.core import RequestError

PROCESSES: Final = 4
"""At most. One that is busy leaves the others to whoever comes meanwhile."""
SECONDS: Final = 5.0
"""For one conversation: usual ones take milliseconds."""
MOST_CHARACTERS: Final = 2 << 20
MEMORY: Final = 1 << 30
"""Bytes of address space."""
LONGEST_REASON: Final = 300
"""Characters of an error's message that are passed on."""


class TemplateProcesses:
    """Renders on the calling thread, on up to ``PROCESSES`` threads at a time. A process starts when it is needed."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[TemplateProcess] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(TemplateProcess())

    def render(self, job: Mapping[str, Any]) -> str:
        """The text of ``Tokenizer.template_job``. Raises RequestError for whatever the template does instead."""
        process = self._idle.get()
        try:
            return process.render(job)
        finally:
            self._idle.put(process)


class TemplateProcess:
    """One process, for one job at a time. It is started anew after its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, job: Mapping[str, Any]) -> str:
        asked = json.dumps(job).encode() + b"\n"
        if self._process is None or self._process.poll() is not None:
            self._process = start()
            weakref.finalize(self, end, self._process)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(asked)
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise RequestError(f"the chat template {ending(process.wait())}; shorten the messages, or change it")
        found = json.loads(answer)
        if "refused" in found:
            raise RequestError(f"the chat template refuses these messages: {found['refused']}")
        text: str = found["text"]
        return text


def start() -> subprocess.Popen[bytes]:
    # Modules are found where this process finds them.
    code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.text.template_process import work; work()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=without_api_keys(os.environ),
        start_new_session=True,  # Ctrl-C in the terminal is the server's
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """When nobody can ask it any more."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def ending(code: int) -> str:
    """What became of the template whose process has ended."""
    return f"did not end within {SECONDS:g} s" if code == -signal.SIGALRM else "needs more memory than it may have"


# --------------------------------------------------------------------------------------------------- in the process


def work() -> None:
    """Render until there is nothing more to come."""
    import resource

    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # SIGALRM ends a process that has no handler for it
        answer = json.dumps(answer_of(render_jinja_template, line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def answer_of(render: Any, line: bytes) -> dict[str, str]:
    try:
        (text,), _ = render(**json.loads(line))
    except MemoryError:
        return {"refused": "it needs more memory than it may have"}
    except Exception as error:
        return {"refused": (str(error) or type(error).__name__)[:LONGEST_REASON]}
    if len(text) > MOST_CHARACTERS:
        return {"refused": f"it makes {len(text)} characters of them, and there may be at most {MOST_CHARACTERS}"}
    return {"text": text}
