"""The main loop of a worker (``text/workers.py``): jobs from standard input one by one, each within its limits."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from penstock.files import said

TABLES: Final = 4
"""Vocabularies that stay loaded. A server has one; an evicted one is read again when it is asked for."""
MOST_LEFT_BEHIND: Final = 1 << 25
"""Bytes that jobs may leave mapped before the worker is replaced. A fresh worker costs a start."""
PAGE: Final = resource.getpagesize()
"""Bytes of a page of memory."""
VOCABULARIES: dict[str, str] = {}
"""The texts of tokenizers' tokenizer.json, by the vocabulary's name."""


def work() -> None:
    """Do jobs until standard input ends, or earlier jobs have left too much memory mapped.

    A job's memory is not all returned to the system, and a job's limit counts from what is mapped when it begins.
    """
    # Ended by a signal, a worker would leave a core file with its users' texts.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    left_behind = 0
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if "task" not in asked:
            load(asked)
            continue
        answered = answer_to(asked)
        left_behind += answered.pop("left_behind", 0)
        answered["leaves"] = "overrun" in answered or left_behind > MOST_LEFT_BEHIND
        sys.stdout.write(json.dumps(answered) + "\n")
        sys.stdout.flush()
        if answered["leaves"]:
            return


def load(told: Mapping[str, Any]) -> None:
    """Store a vocabulary, or import the libraries of a task."""
    if "serialized" in told:
        VOCABULARIES[told["vocabulary"]] = told["serialized"]
    if "load" in told:
        LIBRARIES[told["load"]]()


def answer_to(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job within its limits. Its libraries and vocabulary are loaded before the limits begin."""
    task, given = TASKS[asked["task"]], dict(asked["given"])
    try:
        prepared = PREPARATIONS[asked["task"]](asked.get("vocabulary", ""), given)
        before = mapped()
        # Behind the preparation: libraries and vocabularies stay, and are no cost of this job.
        begin_limits(asked, before)
        found = task(prepared, **given)
        return {"found": found, "left_behind": mapped() - before}
    except MemoryError:
        return {"overrun": "needs more memory than it may have"}
    except BaseException as error:  # a panic of a Rust library is no Exception
        return {"failed": said(error)}
    finally:
        end_limits()


def mapped() -> int:
    """Bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def begin_limits(asked: Mapping[str, Any], before: int) -> None:
    """Set the job's limits; ``before`` is the bytes mapped without it. SIGPROF and SIGALRM then end the process."""
    limit_memory(before + asked["memory"])
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
    signal.setitimer(signal.ITIMER_REAL, asked["patience"])


def limit_memory(size: int | None) -> None:
    """Let this process map at most ``size`` bytes; None: as many as the system lets it."""
    # The hard limit stays what it is: a user's (ulimit -v) may be lowered, but not raised again.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = resource.RLIM_INFINITY if size is None else size
    fits = hard == resource.RLIM_INFINITY or (size is not None and size < hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if fits else hard, hard))


def end_limits() -> None:
    """Take all limits off, so that nothing ends the worker between two jobs."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    limit_memory(None)


# -------------------------------------------------------------------------------------------------------- templates
# Rendering conversations by chat templates.

MOST_CHARACTERS: Final = 2 << 20
"""Most characters of a rendered conversation. A request's body has half as many bytes by default
(``server.settings.MIB``)."""
LONGEST_REASON: Final = 300
"""Characters of an error's message that are passed on. They are about four lines of a terminal."""


def template_library() -> Callable[..., Any]:
    """The function that renders, whose import loads Jinja."""
    from penstock.text.rendering import render_template

    return render_template


def renderer(_: str, __: dict[str, Any]) -> Callable[..., Any]:
    """The preparation of ``render``: templates are given with the job, so only the library is loaded."""
    return template_library()


def render(render_template: Callable[..., Any], **job: Any) -> dict[str, Any]:
    """A conversation as text, or the reason for none: "broken" is the template's fault, "refused" the messages'."""
    from jinja2 import TemplateSyntaxError

    try:
        text, marked = render_template(**job)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        return {"broken": f"is not a Jinja template: {error}"[:LONGEST_REASON]}
    except Exception as error:
        return {"refused": (str(error) or type(error).__name__)[:LONGEST_REASON]}
    if len(text) > MOST_CHARACTERS:
        return {"refused": f"it makes {len(text)} characters of them, and there may be at most {MOST_CHARACTERS}"}
    return {"text": text, "marked": marked}


# --------------------------------------------------------------------------------------------------------- grammars
# Compiling grammars, and reading texts with them.


def grammar_library() -> Any:
    """The module of grammars, whose import loads llguidance."""
    from penstock.text import grammar

    return grammar


def grammar_tokenizer(vocabulary: str, given: dict[str, Any]) -> Any:
    """llguidance's tokenizer, or the text of the error that kept it from being made."""
    size, eos_token_ids = given.pop("vocab_size"), tuple(given.pop("eos_token_ids"))
    return _grammar_tokenizer(vocabulary, size, eos_token_ids)


@lru_cache(TABLES)
def _grammar_tokenizer(vocabulary: str, size: int, eos_token_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(VOCABULARIES[vocabulary], n_vocab=size, eos_token=list(eos_token_ids))
    except Exception as error:
        return said(error)


def check_grammar(tokenizer: Any, grammar: str, **text: Any) -> dict[str, str]:
    """Check a grammar, or the ``text`` so far against it.

    "problem" says what is wrong, "" for nothing; "unusable" is the error with which llguidance refuses the tokenizer.
    """
    if isinstance(tokenizer, str):
        return {"unusable": tokenizer}
    return {"problem": grammar_library().problem_of(grammar, tokenizer, **text)}


# ------------------------------------------------------------------------------------------------------- long texts
# Encoding long texts.


def text_library() -> Any:
    """The module of tokenizers, whose import loads ``tokenizers``."""
    from penstock.text import tokenizer as literal

    return literal


def backend(vocabulary: str, _: dict[str, Any]) -> Any:
    """The preparation of ``encode``: the tokenizer of a vocabulary."""
    return _backend(vocabulary)


@lru_cache(TABLES)
def _backend(vocabulary: str) -> Any:
    """The tokenizer, and its LiteralText for texts with hidden special tokens."""
    from tokenizers import Tokenizer

    from penstock.text.tokenizer import LiteralText

    tokenizer = Tokenizer.from_str(VOCABULARIES[vocabulary])
    return tokenizer, LiteralText(tokenizer)


def encode(backend: Any, text: str, add_special_tokens: bool, literal: bool) -> dict[str, Any]:
    """Token ids of a text."""
    tokenizer, literal_text = backend
    if literal:
        return {"ids": literal_text.encode(text)}
    return {"ids": tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}


LIBRARIES: Final[Mapping[str, Callable[[], Any]]] = {
    "render": template_library,
    "check_grammar": grammar_library,
    "encode": text_library,
}
"""Functions that load a task's libraries before any limit applies."""
Task = Callable[..., dict[str, Any]]
"""A function that does a job: what its preparation has loaded, and the job's arguments, give the answer's object."""
TASKS: Final[Mapping[str, Task]] = {"render": render, "check_grammar": check_grammar, "encode": encode}
PREPARATIONS: Final[Mapping[str, Callable[[str, dict[str, Any]], Any]]] = {
    "render": renderer,
    "check_grammar": grammar_tokenizer,
    "encode": backend,
}
"""Functions that load what a task needs, given the vocabulary's name and the job's arguments."""
