"""Data that the target writes for its drafter, questions and answers; and the drafter's vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from penstock.core import ConfigError, SamplingParams
from penstock.engine.llm import LLM
from penstock.lab.trainer.corpus import Corpus, Document, Message, append_lines, whole_lines
from penstock.text.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------------------------- vocabulary
# The vocabulary of a drafter that cannot draft all tokens: the tokens most frequent in the training data.


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that can be drafted. ``ids_v``: their ids [v] in ascending order; None for the target's vocabulary.

    Shares, 0 to 1, are of the tokens to be learned, in the data to train on and in the data held out.
    """

    ids_v: Tensor | None
    size: int
    training_share: float = 1.0
    held_out_share: float = 1.0


def choose(corpus: Corpus, size: int, vocab_size: int) -> Vocabulary:
    """The ``size`` tokens most frequent among those to be learned; of equally frequent ones the lower ids."""
    if size >= vocab_size:
        return Vocabulary(None, vocab_size)
    training, held_out = (counts(corpus, side, vocab_size) for side in (corpus.training, corpus.held_out))
    # A stable sort gives ties to the lower id; ids are stored in ascending order.
    ids = np.sort(np.argsort(-training, kind="stable")[:size])
    shares = [float(of[ids].sum() / of.sum()) for of in (training, held_out)]
    return Vocabulary(torch.from_numpy(ids), size, *shares)


def counts(corpus: Corpus, side: Sequence[int], vocab_size: int) -> np.ndarray:
    """The number of times that each token of the target is to be drafted, [V]."""
    found = np.zeros(vocab_size, dtype=np.int64)
    for number in side:
        sample = corpus.samples[number]
        found += np.bincount(sample.tokens_L[2:][sample.learned_L[2:]], minlength=vocab_size)
    return found


# ------------------------------------------------------------------------------------------------------------ questions
# Questions that the target itself asks: the text that a chat model writes after its template's beginning of a user's
# message.
#
# Magpie (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", 2024,
# section 2): an instruct model was trained on whole conversations, so that it also knows what users say. No data set is
# needed.

TOGETHER: Final = 256
"""Questions that are written at a time: a process that is killed loses no more."""
MOST_ATTEMPTS: Final = 8
"""Most attempts for each question: a target that needs more repeats itself, and has no more to ask."""
LONGEST_SHARE: Final = 4
"""Divisor of a conversation's length that gives the longest question; a question that is cut off is left out. Three
quarters are left for the answer."""
PLACE: Final = "WHAT THE USER SAYS"
"""A text in the place of a user's message, by which its beginning and end are found in the template."""


@dataclass(frozen=True)
class Opening:
    """The tokens before a user's message in the chat template, and its end: a special token or a text.

    <|im_start|>user\\n   [what the user says]   <|im_end|>\\n
    \\__ tokens ______/                          \\ stop ___/
    """

    tokens: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def opening_of(tokenizer: Tokenizer) -> Opening:
    """The template's opening.

    Raises ConfigError for a checkpoint without a chat template, or with one that drops messages.
    """
    rendered = tokenizer.render([{"role": "user", "content": PLACE}], add_generation_prompt=False)
    before, found, after = rendered.partition(PLACE)
    if not found:
        raise ConfigError("self_generate: the chat template leaves out what the user says; give data instead")
    tokens, end = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (before, after.strip()))
    # A silent token ends the text by its id; anything else has to be found in the text.
    if end and tokenizer.is_silent(end[0], skip_special_tokens=True):
        return Opening(tokens, stop_token_ids=end[:1])
    return Opening(tokens, stop=(after.strip() or "\n",))


def key_of(target: str, max_length: int, seed: int) -> str:
    """The key of stored questions: a hash of the target (its ``states.identity``) and the sampling, 24 digits."""
    return hashlib.sha256(json.dumps([target, max_length, seed]).encode()).hexdigest()[:24]


def ask(count: int, llm: LLM, file: Path, max_length: int, seed: int) -> Iterator[list[str]]:
    """Yields the different questions so far, beginning with those in ``file``, until there are ``count``.

    They are sampled at temperature 1. Attempt i has the seed ``seed`` + i, so that a resumed run writes the same
    questions as one without interruption. Raises ConfigError if the target repeats itself.
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
    """``count`` questions; "" for one that was cut off."""
    one = SamplingParams(max_tokens=most_tokens, stop=opening.stop, stop_token_ids=opening.stop_token_ids)
    params = [replace(one, seed=seed + i) for i in range(count)]
    outputs = llm.generate([{"prompt_token_ids": list(opening.tokens)}] * count, params)
    completions = [output.outputs[0] for output in outputs]
    return [one.text.strip() if one.finish_reason == "stop" else "" for one in completions]


def distinct(attempts: list[str]) -> list[str]:
    """The attempts without empty ones, and without those that differ from an earlier one only in case and spacing."""
    kept: dict[str, str] = {}
    for text in attempts:
        kept.setdefault(" ".join(text.lower().split()), text)
    kept.pop("", None)
    return list(kept.values())


def conversations(questions: list[str]) -> list[Document]:
    """Conversations of each question and an empty answer, which is still to be written."""
    return [
        Document(
            f"question {i}",
            messages=({"role": "user", "content": question}, {"role": "assistant", "content": ""}),
        )
        for i, question in enumerate(questions)
    ]


# ----------------------------------------------------------------------------------------------------------- regenerate
# Answers that the target itself writes, since a drafter has to predict the target's tokens.

ANSWERED_TOGETHER: Final = 256
"""Conversations that are answered at a time: a process that is killed loses no more."""


@dataclass(frozen=True)
class Writing:
    """Sampling of the answers: the target's generation_config, but for these fields.

    Conversations have the ``temperatures`` in turn, if there are any, and seeds of their own derived from ``seed``.
    """

    max_length: int
    seed: int
    temperatures: tuple[float, ...] = ()

    def sampling(self, number: int, defaults: SamplingParams, room: int) -> SamplingParams:
        """Sampling parameters of the conversation ``number``, whose answer has room for so many tokens."""
        own = self.temperatures[number % len(self.temperatures)] if self.temperatures else defaults.temperature
        return replace(defaults, seed=self.seed + number, max_tokens=room, temperature=own)


def answers_key(documents: Sequence[Document], target: str, writing: Writing) -> str:
    """The key of stored answers: a hash of the target (its ``states.identity``), the conversations and the sampling."""
    parts = [target, asdict(writing), [document.messages for document in documents]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def regenerate(documents: Sequence[Document], llm: LLM, file: Path, writing: Writing) -> Iterator[list[Document]]:
    """Yields the conversations answered so far, beginning with those in ``file``, until all are.

    Raises ConfigError for a plain text, which has no answers.
    """
    for document in documents:
        if not document.messages:
            raise ConfigError(f"{document.where}: is no conversation, so there is no answer to write; omit regenerate")
    held = [json.loads(line)["messages"] for line in whole_lines(file)]
    written = [Document(one.where, messages=tuple(said)) for one, said in zip(documents, held, strict=False)]
    yield written
    while len(written) < len(documents):
        numbers = range(len(written), min(len(written) + ANSWERED_TOGETHER, len(documents)))
        fresh = answered({number: documents[number] for number in numbers}, llm, writing)
        append_lines(file, [json.dumps(asdict(document)) for document in fresh])
        written = [*written, *fresh]
        yield written


def answered(documents: Mapping[int, Document], llm: LLM, writing: Writing) -> list[Document]:
    """Answer turn by turn, all conversations together: each answer follows the answers that were written before it."""
    said: dict[int, list[Message]] = {number: [] for number in documents}
    for turn in range(max(len(document.messages) for document in documents.values())):
        asked = {}
        for number, document in documents.items():
            message = document.messages[turn] if turn < len(document.messages) else None
            if message is not None and message["role"] == "assistant":
                asked[number] = said[number]
            elif message is not None:
                said[number].append(message)
        for number, answer in answers(asked, llm, writing).items():
            said[number].append({"role": "assistant", "content": answer})
    return [Document(documents[number].where, messages=tuple(messages)) for number, messages in said.items()]


def answers(asked: Mapping[int, Sequence[Message]], llm: LLM, writing: Writing) -> dict[int, str]:
    """One answer to each conversation; "" if there is no room for one."""
    tokenizer, defaults = llm.get_tokenizer(), llm.get_default_sampling_params()
    prompts = {number: tokenizer.apply_chat_template(list(messages)) for number, messages in asked.items()}
    room = {number: writing.max_length - len(prompt) for number, prompt in prompts.items()}
    fit = [number for number in asked if room[number] > 0]
    params = [writing.sampling(number, defaults, room[number]) for number in fit]
    outputs = llm.generate([{"prompt_token_ids": prompts[number]} for number in fit], params) if fit else []
    found = {number: output.outputs[0].text for number, output in zip(fit, outputs, strict=True)}
    return {number: found.get(number, "") for number in asked}
