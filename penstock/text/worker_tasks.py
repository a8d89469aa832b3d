"""What a worker does (``text/workers.py``): one job after another from standard input, each within its limits."""

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
"""Vocabularies that are kept loaded."""
MOST_LEFT_BEHIND: Final = 1 << 25
"""Bytes that jobs may have left mapped before a worker is replaced."""
PAGE: Final = resource.getpagesize()
VOCABULARIES: dict[str, str] = {}
"""By name, the texts of their tokenizer.json."""


def work() -> None:
    """Do jobs until there is nothing more to come, or those before have left too much behind.

    What a job has held is not all given back to the system, and a job's limit counts from what there is.
    """
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
    """Take in a vocabulary, or import what a task needs."""
    if "serialized" in told:
        VOCABULARIES[told["vocabulary"]] = told["serialized"]
    if "load" in told:
        LIBRARIES[told["load"]]()


def answer_to(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job within its limits. What it needs loaded is loaded before they begin to count."""
    task, given = TASKS[asked["task"]], dict(asked["given"])
    try:
        prepared = PREPARATIONS[asked["task"]](asked.get("vocabulary", ""), given)
        before = mapped()
        begin_limits(asked, before)
        found = task(prepared, **given)
        return {"found": found, "left_behind": mapped() - before}
    except MemoryError:
        return {"overrun": "needs more memory than it may have"}
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return {"failed": said(error)}
    finally:
        end_limits()


def mapped() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def begin_limits(asked: Mapping[str, Any], before: int) -> None:
    """SIGPROF and SIGALRM end a process that has no handler for them. ``before`` is what is mapped without the job."""
    resource.setrlimit(resource.RLIMIT_AS, (before + asked["memory"], resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
    signal.setitimer(signal.ITIMER_REAL, asked["patience"])


def end_limits() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# -------------------------------------------------------------------------------------------------------- templates

MOST_CHARACTERS: Final = 2 << 20
"""Of a rendered conversation."""
LONGEST_REASON: Final = 300
"""Characters of an error's message that are passed on."""


def template_library() -> Callable[..., Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template  # type: ignore[no-any-return]


def renderer(_: str, __: dict[str, Any]) -> Callable[..., Any]:
    return template_library()


def render(render_jinja_template: Callable[..., Any], **job: Any) -> dict[str, Any]:
    """A conversation as text; or why there is none: "broken" is the template's fault, "refused" the messages'."""
    from jinja2 import TemplateSyntaxError

    try:
        (text,), marked = render_jinja_template(**job)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        return {"broken": f"is not a Jinja template: {error}"[:LONGEST_REASON]}
    except Exception as error:
        return {"refused": (str(error) or type(error).__name__)[:LONGEST_REASON]}
    if len(text) > MOST_CHARACTERS:
        return {"refused": f"it makes {len(text)} characters of them, and there may be at most {MOST_CHARACTERS}"}
    return {"text": text, "marked": marked[0] if marked else []}


# --------------------------------------------------------------------------------------------------------- grammars


def grammar_library() -> Any:
    from penstock.text import grammar

    return grammar


def grammar_tokenizer(vocabulary: str, given: dict[str, Any]) -> Any:
    """llguidance's tokenizer; or, as text, why there is none."""
    size, eos_token_ids = given.pop("vocab_size"), tuple(given.pop("eos_token_ids"))
    return _grammar_tokenizer(vocabulary, size, eos_token_ids)


@lru_cache(TABLES)
def _grammar_tokenizer(vocabulary: str, size: int, eos_token_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(VOCABULARIES[vocabulary], n_vocab=size, eos_token=list(eos_token_ids))
    except Exception as error:
        return said(error)


def check_grammar(tokenizer: Any, grammar: str) -> dict[str, str]:
    """What keeps a grammar from being used, nothing if it can be; or what keeps the tokenizer from it."""
    if isinstance(tokenizer, str):
        return {"unusable": tokenizer}
    return {"problem": grammar_library().problem_of(grammar, tokenizer)}


# ------------------------------------------------------------------------------------------------------- long texts


def text_library() -> Any:
    from penstock.text import literal

    return literal


def backend(vocabulary: str, _: dict[str, Any]) -> Any:
    return _backend(vocabulary)


@lru_cache(TABLES)
def _backend(vocabulary: str) -> Any:
    """The tokenizer, and what reads special tokens in its texts as text."""
    from tokenizers import Tokenizer

    from penstock.text.literal import LiteralText

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
Task = Callable[..., dict[str, Any]]
TASKS: Final[Mapping[str, Task]] = {"render": render, "check_grammar": check_grammar, "encode": encode}
PREPARATIONS: Final[Mapping[str, Callable[[str, dict[str, Any]], Any]]] = {
    "render": renderer,
    "check_grammar": grammar_tokenizer,
    "encode": backend,
}
"""What a task needs loaded, made of the vocabulary's name and the job's arguments."""
