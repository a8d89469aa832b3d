"""Documents: files read into sequences of token ids, with the tokens marked that are to be learned; lines on disk."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.core import ConfigError, RequestError, from_json
from penstock.text.tokenizer import Tokenizer

# --------------------------------------------------------------------------------------------------------------- corpus
# Reads files into documents, and documents into sequences of token ids with the tokens marked that are to be learned.
#
# ``.jsonl`` holds one object in each line: ``messages`` (role, content), ShareGPT's ``conversations`` (from, value), or
# ``text``. In a conversation the assistant's tokens are learned, in a text all. Any other file is plain text.

ROLES: Final = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""The role in chat templates of each speaker, by ShareGPT's names and the templates' own."""
HELD_OUT: Final = 0.04
"""Share of the documents, 0 to 1, that is held out for evaluation. Each evaluation looks at no more than
``run.HELD_OUT_TOKENS`` of it."""
FEWEST: Final = 3
"""Tokens of the shortest sequence: one whose state is read, the next one, and one to draft."""

Message = dict[str, str]
"""A message with its ``role`` and ``content``."""


@dataclass(frozen=True)
class Document:
    """A text, or a conversation. ``where``: its file, and its line in a ``.jsonl``, in words."""

    where: str
    text: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A sequence of L tokens of a document, given by its number: int64 ids, and a mask of those to be learned."""

    document: int
    tokens_L: np.ndarray
    learned_L: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens_L)

    @property
    def lessons(self) -> int:
        """The number of tokens that a drafter can learn from: the first two have nothing before them to draft from."""
        return int(self.learned_L[2:].sum())


@dataclass(frozen=True)
class Corpus:
    """All sequences, with the indices of those that are trained on and of those held out."""

    samples: Sequence[Sample]
    training: Sequence[int]
    held_out: Sequence[int]

    def digest(self) -> str:
        """A hash of all tokens and masks, in hexadecimal digits."""
        found = hashlib.sha256()
        for sample in self.samples:
            found.update(np.int64(len(sample)).tobytes() + sample.tokens_L.tobytes() + sample.learned_L.tobytes())
        return found.hexdigest()


# -------------------------------------------------------------------------------------------------------------- files
# Files.


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """All documents in the files, and in folders and their subfolders, in the order of names.

    Raises ConfigError naming the file, and the line of a ``.jsonl``, that cannot be used.
    """
    found = [document for path in paths for file in files_of(path) for document in documents_of(file)]
    if not found:
        raise ConfigError(f"data: {', '.join(map(str, paths))} holds no text; give files with some")
    return found


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files in a folder. Raises ConfigError if there is neither."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not path.is_file():
        raise ConfigError(f"data: there is no file or folder {path}; check its name")
    return [path]


def documents_of(file: Path) -> Iterator[Document]:
    """The documents in a file. Raises ConfigError for a file that cannot be read and for a line that holds none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"data: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {file} is no UTF-8 text ({error}); convert it, or move it elsewhere") from error
    if file.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield document_of(line, f"{file}, line {number}")
    elif text:
        yield Document(str(file), text=text)


def document_of(line: str, where: str) -> Document:
    """The document in a line. Raises ConfigError for a line that holds none."""
    try:
        entry: Any = from_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if isinstance(entry, dict):
        if isinstance(entry.get("messages"), list):
            return conversation(entry["messages"], "messages", ("role", "content"), where)
        if isinstance(entry.get("conversations"), list):
            return conversation(entry["conversations"], "conversations", ("from", "value"), where)
        if isinstance(entry.get("text"), str) and entry["text"]:
            return Document(where, text=entry["text"])
    raise ConfigError(f"{where}: needs 'messages' or 'conversations' (a list of messages), or 'text' that is not empty")


def conversation(entries: Sequence[Any], field: str, names: tuple[str, str], where: str) -> Document:
    """A document of messages. ``names``: the fields of speaker and text. Raises ConfigError naming the field."""
    messages = []
    for i, entry in enumerate(entries):
        who, said = (entry.get(name) if isinstance(entry, Mapping) else None for name in names)
        if who not in ROLES:
            raise ConfigError(f"{where}: {field}[{i}].{names[0]} is {who!r}; known: {', '.join(ROLES)}")
        if not isinstance(said, str):
            raise ConfigError(f"{where}: {field}[{i}].{names[1]} is {said!r}; it has to be text")
        messages.append({"role": ROLES[who], "content": said})
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{where}: {field} has no message of the assistant's to learn from; remove the line")
    return Document(where, messages=tuple(messages))


# ------------------------------------------------------------------------------------------------------------- tokens
# Tokens.


def make_corpus(documents: Sequence[Document], tokenizer: Tokenizer, max_length: int) -> Corpus:
    """Sequences of at most ``max_length`` tokens; those without anything to learn are left out.

    Raises ConfigError for a conversation that the target's chat template refuses, and if fewer than two are left.
    """
    samples = []
    for number, document in enumerate(documents):
        tokens_L, learned_L = tokens_of(document, tokenizer)
        # A text is cut into pieces; of a conversation only the beginning remains, since its turns refer to each other.
        stop = len(tokens_L) if not document.messages else min(max_length, len(tokens_L))
        for start in range(0, stop, max_length):
            piece = slice(start, start + max_length)
            samples.append(Sample(number, tokens_L[piece], learned_L[piece]))
    samples = [sample for sample in samples if len(sample) >= FEWEST and sample.lessons]
    if len(samples) < 2:
        raise ConfigError(
            f"data: {len(samples)} sequences of at most {max_length} tokens have something to learn; one has to be "
            "held out and one trained on: give more data, or a greater max_length"
        )
    return Corpus(samples, *split(samples))


def split(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Indices to train on, and indices held out.

    Whole documents are held out, chosen by a hash of their tokens, or the end of a single document. If the chosen ones
    would be most of the data, the shortest document is held out instead.
    """
    names: dict[int, Any] = {}
    for sample in samples:
        names.setdefault(sample.document, hashlib.sha256()).update(sample.tokens_L.tobytes())
    if len(names) == 1:
        kept = len(samples) - max(1, round(HELD_OUT * len(samples)))
        return list(range(kept)), list(range(kept, len(samples)))
    # The order of hashes depends on nothing but the texts: neither on the order of files nor on their names.
    order = sorted(names, key=lambda number: names[number].digest())
    chosen = set(order[: max(1, round(HELD_OUT * len(order)))])
    sizes = Counter(sample.document for sample in samples)
    if 2 * sum(sizes[number] for number in chosen) > len(samples):
        chosen = {min(order, key=lambda number: sizes[number])}
    sides: tuple[list[int], list[int]] = ([], [])
    for i, sample in enumerate(samples):
        sides[sample.document in chosen].append(i)
    return sides


def tokens_of(document: Document, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, and a mask of those to be learned. Raises ConfigError naming the document."""
    try:
        if document.messages:
            ids, learned = answers_of(document.messages, tokenizer)
        else:
            ids = tokenizer.encode(document.text)
            learned = [True] * len(ids)
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{document.where}: {error}") from error
    if not any(learned):
        raise ConfigError(f"{document.where}: no answer was found in what the target's chat template makes of it")
    return np.asarray(ids, dtype=np.int64), np.asarray(learned, dtype=bool)


def answers_of(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """A conversation's tokens in the target's format, and for each of them whether it is the assistant's.

    The template marks answers itself, or an answer is the difference of two shorter renderings:

        system user | generation prompt [answer, end of turn] user ...
        \\__ render(before, generation prompt) __/            |
        \\__ render(before + answer) __________________________/

    Some templates render earlier turns differently once later ones follow (without reasoning, for example). Such turns
    are no prefix of the whole, and are not learned from.
    """
    if tokenizer.marks_answers:
        return tokenizer.encode_marked(messages)
    whole = tokenizer.render(messages, add_generation_prompt=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.render(messages[:i], add_generation_prompt=True)
            after = tokenizer.render(messages[: i + 1], add_generation_prompt=False)
            if after.startswith(before) and whole.startswith(after):
                spans.append((len(before), len(after)))
    ids, ends = tokenizer.encode_with_ends(whole)
    # A token belongs to the answer in which its text ends.
    return ids, [any(first < end <= last for first, last in spans) for end in ends]


# ---------------------------------------------------------------------------------------------------------------- lines
# Append-only files of lines: a process that is killed can only cut off the last line, which is written again.


def whole_lines(file: Path) -> list[str]:
    """The lines of a file; [] without a file. A last line that was cut off is removed from the file."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]
    if not text.endswith("\n"):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines


def append_lines(file: Path, lines: Iterable[str]) -> None:
    """Append lines, and return once they are on the disk."""
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(f"{line}\n" for line in lines)
        opened.flush()
        os.fsync(opened.fileno())
