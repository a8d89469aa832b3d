"""Questions that the target itself asks: a chat model's own text after its template's opening of a user's message.

Magpie (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", 2024, section
2): an instruct model was trained on whole conversations, so that it also knows what users say. No data set is needed.
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
"""Questions that are written at a time, the most that a kill loses."""
MOST_ATTEMPTS: Final = 8
"""Most attempts per question; a target that repeats itself more often than that has no more to ask."""
LONGEST_SHARE: Final = 4
"""Divisor of a conversation's length for the longest question; a question that is cut off there is left out."""
PLACE: Final = "WHAT THE USER SAYS"


@dataclass(frozen=True)
class Opening:
    """The tokens before a user's message in the chat template, and its end: a special token, or a text.

    <|im_start|>user\\n   [what the user says]   <|im_end|>\\n
    \\__ tokens ______/                          \\ stop ___/
    """

    tokens: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def opening_of(tokenizer: Tokenizer) -> Opening:
    """The template's opening. Raises ConfigError for a checkpoint without a chat template, or whose template drops
    messages."""
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
    """Yields the different questions written so far, those in ``file`` first, until there are ``count``.

    They are sampled at temperature 1. Attempt i has the seed ``seed`` + i, so that a resumed run writes what an
    uninterrupted one would have. Raises ConfigError if the target repeats itself.
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
    """``count`` questions; a question that was cut off is empty."""
    one = SamplingParams(max_tokens=most_tokens, stop=opening.stop, stop_token_ids=opening.stop_token_ids)
    params = [replace(one, seed=seed + i) for i in range(count)]
    outputs = llm.generate([{"prompt_token_ids": list(opening.tokens)}] * count, params)
    completions = [output.outputs[0] for output in outputs]
    return [one.text.strip() if one.finish_reason == "stop" else "" for one in completions]


def distinct(attempts: list[str]) -> list[str]:
    """The attempts that are not empty, without those that differ from an earlier one only in case and spacing."""
    kept: dict[str, str] = {}
    for text in attempts:
        kept.setdefault(" ".join(text.lower().split()), text)
    kept.pop("", None)
    return list(kept.values())


def conversations(questions: list[str]) -> list[Document]:
    """Conversations of each question and an empty answer that is still to be written."""
    return [
        Document(
            f"question {i}",
            messages=({"role": "user", "content": question}, {"role": "assistant", "content": ""}),
        )
        for i, question in enumerate(questions)
    ]
