"""Questions that the target itself asks: what a chat model writes where its template says that the user speaks.

Magpie (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", 2024, section
2): an instruct model has learned conversations whole, so that it also knows what users say. Nobody needs a data set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.core import ConfigError, SamplingParams
from penstock.engine.llm import LLM
from penstock.text.tokenizer import Tokenizer
from penstock.trainer.data.corpus import Document
from penstock.trainer.data.lines import append_lines, whole_lines

TOGETHER: Final = 256
"""Questions that are written at a time, and lost by a kill at most."""
MOST_ATTEMPTS: Final = 8
"""Times as many attempts as questions; a target that repeats itself more often than that has no more to say."""
LONGEST_SHARE: Final = 4
"""A question takes at most 1 / LONGEST_SHARE of a conversation's tokens; one that is cut off there is left out."""
PLACE: Final = "WHAT THE USER SAYS"


@dataclass(frozen=True)
class Opening:
    """What comes before a user's message in the chat template, and what ends the message: a special token, or a text.

    <|im_start|>user\\n   [what the user says]   <|im_end|>\\n
    \\__ tokens ______/                          \\ stop ___/
    """

    tokens: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def opening_of(tokenizer: Tokenizer) -> Opening:
    """Raises ConfigError for a checkpoint without a chat template, or with one that does not repeat what users say."""
    rendered = tokenizer.render([{"role": "user", "content": PLACE}], add_generation_prompt=False)
    before, found, after = rendered.partition(PLACE)
    if not found:
        raise ConfigError("self_generate: the chat template leaves out what the user says; give data instead")
    tokens, end = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (before, after.strip()))
    if end and tokenizer.is_silent(end[0], skip_special_tokens=True):
        return Opening(tokens, stop_token_ids=end[:1])
    return Opening(tokens, stop=(after.strip() or "\n",))


def key_of(target: str, max_length: int, seed: int) -> str:
    """The stored questions' key: a hash of the target (its ``cache.identity``) and the sampling."""
    return hashlib.sha256(json.dumps([target, max_length, seed]).encode()).hexdigest()[:24]


def ask(count: int, llm: LLM, file: Path, max_length: int, seed: int) -> Iterator[list[str]]:
    """Yields the different questions written so far, from ``file`` and onwards, until there are ``count``.

    Sampled at temperature 1. Attempt i has the seed ``seed`` + i, so that a run that goes on writes what an unbroken
    one would have. Raises ConfigError if the target repeats itself.
    """
    opening = opening_of(llm.get_tokenizer())
    attempts: list[str] = [json.loads(line) for line in whole_lines(file)]
    questions = distinct(attempts)
    yield questions[:count]
    while len(questions) < count:
        if len(attempts) >= MOST_ATTEMPTS * count + TOGETHER:
            raise ConfigError(
                f"self_generate: of {len(attempts)} questions that the target asked only {len(questions)} are "
                "different and whole; ask for fewer, or give data instead"
            )
        missing = min(TOGETHER, count - len(questions))
        fresh = attempted(missing, opening, llm, max_length // LONGEST_SHARE, seed + len(attempts))
        append_lines(file, [json.dumps(text) for text in fresh])
        attempts += fresh
        questions = distinct(attempts)
        yield questions[:count]


def attempted(count: int, opening: Opening, llm: LLM, most_tokens: int, seed: int) -> list[str]:
    """``count`` questions; empty is one that has not come to its end."""
    one = SamplingParams(max_tokens=most_tokens, stop=opening.stop, stop_token_ids=opening.stop_token_ids)
    params = [replace(one, seed=seed + i) for i in range(count)]
    outputs = llm.generate([{"prompt_token_ids": list(opening.tokens)}] * count, params)
    completions = [output.outputs[0] for output in outputs]
    return [one.text.strip() if one.finish_reason == "stop" else "" for one in completions]


def distinct(attempts: list[str]) -> list[str]:
    """Those that say something, each once, whatever its case and spacing."""
    kept: dict[str, str] = {}
    for text in attempts:
        kept.setdefault(" ".join(text.lower().split()), text)
    kept.pop("", None)
    return list(kept.values())


def conversations(questions: list[str]) -> list[Document]:
    """Each question with an answer that is still to be written."""
    return [
        Document(
            f"question {i}",
            messages=({"role": "user", "content": question}, {"role": "assistant", "content": ""}),
        )
        for i, question in enumerate(questions)
    ]
