"""Chat templates rendered in processes of their own.

A template is a program of whoever made the checkpoint, and clients set its variables. In a process it can be ended:
the kernel does that when its time is up, whatever it is doing, and bounds its memory.

      user's process --stdin: {"chat_template": ..., "conversations": [...], ...}--> template process
                     <-stdout: {"text": ...}, {"refused": ...} or {"broken": ...}---

The process ends with the user's: its standard input is then closed.
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
from functools import cache
from typing import Any, Final, NamedTuple

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


class BrokenTemplate(RequestError):
    """The template is no Jinja, or takes more time or memory than it may: most likely with any other messages, too."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marked: list[list[int]]
    """Where what is marked as the assistant's ({% generation %}) begins and ends in it, if that was asked for."""


@cache
def template_processes() -> TemplateProcesses:
    """This process's own. A child that it forks has others."""
    os.register_at_fork(after_in_child=template_processes.cache_clear)
    return TemplateProcesses()


class TemplateProcesses:
    """Renders on the calling thread, on up to ``PROCESSES`` threads at a time. A process starts when it is needed."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[TemplateProcess] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(TemplateProcess())

    def render(self, job: Mapping[str, Any]) -> Rendered:
        """``job`` are arguments of transformers' ``render_jinja_template``, for one conversation.

        Raises BrokenTemplate, or else RequestError for whatever the template does instead, and for what is not JSON.
        """
        process = self._idle.get()
        try:
            return process.render(job)
        finally:
            self._idle.put(process)


class TemplateProcess:
    """One process, for one job at a time. It is started anew after its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, job: Mapping[str, Any]) -> Rendered:
        try:
            asked = json.dumps(job).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the chat template is given what is not JSON: {error}") from error
        if self._process is None or self._process.poll() is not None:
            self._process = start()
            weakref.finalize(self, end, self._process, os.getpid())
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(asked)
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise BrokenTemplate(f"the chat template {ending(process.wait())}; shorten the messages, or change it")
        found = json.loads(answer)
        if "broken" in found:
            raise BrokenTemplate(f"the chat template {found['broken']}")
        if "refused" in found:
            raise RequestError(f"the chat template refuses these messages: {found['refused']}")
        return Rendered(found["text"], found["marked"])


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


def end(process: subprocess.Popen[bytes], owner: int) -> None:
    """When nobody can ask it any more: nobody of its owner's, whose forked children have this handle, too."""
    if os.getpid() != owner:
        return
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


def answer_of(render: Any, line: bytes) -> dict[str, Any]:
    from jinja2 import TemplateSyntaxError

    try:
        (text,), marked = render(**json.loads(line))
    except MemoryError:
        return {"broken": "needs more memory than it may have"}
    except TemplateSyntaxError as error:
        return {"broken": f"is not a Jinja template: {error}"[:LONGEST_REASON]}
    except Exception as error:
        return {"refused": (str(error) or type(error).__name__)[:LONGEST_REASON]}
    if len(text) > MOST_CHARACTERS:
        return {"refused": f"it makes {len(text)} characters of them, and there may be at most {MOST_CHARACTERS}"}
    return {"text": text, "marked": marked[0] if marked else []}
