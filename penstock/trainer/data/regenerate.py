"""Answers written anew by the target itself: what a drafter has to foresee is what the target says."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from penstock.core import ConfigError, SamplingParams
from penstock.engine.llm import LLM
from penstock.text.tokenizer import Tokenizer
from penstock.trainer.data.corpus import Document, Message

TOGETHER: Final = 32
"""Conversations that are written at a time, and lost by a kill at most."""


def key_of(documents: Sequence[Document], target: str, max_length: int, seed: int) -> str:
    """Changes with the model, the conversations and how they are written; ``target`` is the model's identity."""
    parts = [target, max_length, seed, [document.messages for document in documents]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def regenerate(
    documents: Sequence[Document], llm: LLM, file: Path, max_length: int, seed: int
) -> Iterator[list[Document]]:
    """Yields the conversations written so far, from ``file`` and onwards, until all are.

    Sampled as the target's generation_config says. Raises ConfigError for a plain text, which has no answers.
    """
    for document in documents:
        if not document.messages:
            raise ConfigError(f"{document.where}: is no conversation, so there is no answer to write; omit regenerate")
    written = read(file, documents)
    yield written
    while len(written) < len(documents):
        some = documents[len(written) : len(written) + TOGETHER]
        fresh = answered(some, llm, max_length, seed)
        with file.open("a", encoding="utf-8") as opened:
            opened.writelines(json.dumps(asdict(document)) + "\n" for document in fresh)
            opened.flush()
            os.fsync(opened.fileno())
        written = [*written, *fresh]
        yield written


def read(file: Path, documents: Sequence[Document]) -> list[Document]:
    """What a file holds, without a last line that a kill has cut off; that is removed from it."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]
    if not text.endswith("\n"):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    held = [json.loads(line)["messages"] for line in lines]
    return [Document(one.where, messages=tuple(said)) for one, said in zip(documents, held, strict=False)]


def answered(documents: Sequence[Document], llm: LLM, max_length: int, seed: int) -> list[Document]:
    """Turn by turn, all conversations together: each answer follows the answers written before it."""
    tokenizer, texts = llm.get_tokenizer(), [list[Message]() for _ in documents]
    for turn in range(max(len(document.messages) for document in documents)):
        asked = []
        for i, document in enumerate(documents):
            message = document.messages[turn] if turn < len(document.messages) else None
            if message is not None and message["role"] == "assistant":
                asked.append(i)
            elif message is not None:
                texts[i].append(message)
        for i, answer in zip(asked, answers([texts[i] for i in asked], llm, tokenizer, max_length, seed), strict=True):
            texts[i].append({"role": "assistant", "content": answer})
    return [Document(one.where, messages=tuple(said)) for one, said in zip(documents, texts, strict=True)]


def answers(
    asked: Sequence[Sequence[Message]], llm: LLM, tokenizer: Tokenizer, max_length: int, seed: int
) -> list[str]:
    """One answer to each; none to what has no room left for one."""
    prompts = [tokenizer.apply_chat_template(list(messages)) for messages in asked]
    room = [max_length - len(prompt) for prompt in prompts]
    fit = [i for i, tokens in enumerate(room) if tokens > 0]
    defaults = asdict(llm.get_default_sampling_params())
    params = [SamplingParams(**{**defaults, "seed": seed, "max_tokens": room[i]}) for i in fit]
    outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in fit], params) if fit else []
    found = {i: output.outputs[0].text for i, output in zip(fit, outputs, strict=True)}
    return [found.get(i, "") for i in range(len(asked))]
