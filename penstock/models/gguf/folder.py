"""A GGUF file's configuration, tokenizer and chat template as a Hugging Face folder without weights.

Whoever reads a checkpoint's files finds them there: tokenizer, grammars, chat templates, recordings. The folder is made
once, in the cache of assets beside the hub's, under a name that is a hash of the file's header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import transformers
from huggingface_hub import cached_assets_path

from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, GENERATION_FILE, problem_in, shown
from penstock.models.gguf.accepted import check_accepted
from penstock.models.gguf.blocks import mapped
from penstock.models.gguf.config import ROPE_TENSORS, config_table, entries_alone
from penstock.models.gguf.header import ARRAY, STRING, Header
from penstock.scratch import scratch_folder
from penstock.text.tokenizer import usable_tokenizer
from penstock.text.tokenizer_bounds import check_tokenizer_files

LAYOUT: Final = 1
"""Of these folders: another number makes them anew."""
TOKENS: Final = "tokenizer.ggml.tokens"
MERGES: Final = "tokenizer.ggml.merges"
ENDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Tokens that end a text, a turn, a message."""
SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
MOST_FACTORS: Final = 1 << 20
"""Bytes of a tensor that says how rotary frequencies are scaled."""
MOST_CUTS: Final = 1 << 25
"""Ways to cut tokens in two, where merges have to be found among them; a vocabulary of 256,000 has 16 million."""


def folder_of(header: Header) -> Path:
    """The folder of a file that is accepted; made if it is not there. Raises ConfigError for what cannot be read."""
    check_accepted(header)
    try:
        cache = cached_assets_path("penstock", "gguf")
        folder: Path = cache / name_of(header)
        if not folder.is_dir():
            make(header, folder)
    except OSError as error:
        raise ConfigError(
            f"model: {header.path}: its tokenizer cannot be kept: {error}; set HF_ASSETS_CACHE to a folder that can be "
            "written to"
        ) from error
    return folder


@contextlib.contextmanager
def folder_for(header: Header) -> Iterator[Path]:
    """``folder_of`` a file. What the block refuses of it leaves no folder that was not there before."""
    place: Path = cached_assets_path("penstock", "gguf") / name_of(header)
    known = place.is_dir()
    folder = folder_of(header)
    try:
        yield folder
    except ConfigError:
        if not known:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def name_of(header: Header) -> str:
    """It changes with all that the folder is made of, and with who makes it."""
    found = hashlib.sha256(f"{LAYOUT} {transformers.__version__}\n".encode())
    found.update(header.bytes())
    for name in ROPE_TENSORS:
        info = header.tensors.get(name)
        if info is not None and info.nbytes <= MOST_FACTORS:  # a larger one is refused
            found.update(mapped(header.path, info).numpy().tobytes())
    return found.hexdigest()[:32]


def make(header: Header, folder: Path) -> None:
    """Write the folder beside its place and move it there whole: others may be making it, too."""
    with scratch_folder("new-", folder.parent) as new:
        made = new / "made"
        made.mkdir()
        table = config_table(header)
        (made / CONFIG_FILE).write_text(json.dumps(table, indent=1))
        (made / GENERATION_FILE).write_text(json.dumps({"eos_token_id": ends(header), **sampling(header)}))
        if header.count(TOKENS):
            write_tokenizer(header, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def ends(header: Header) -> list[Any]:
    """The ids of tokens that end a text. Raises ConfigError for one beyond the vocabulary."""
    stated, size = [header.value(key) for key in ENDS], header.count(TOKENS)
    for key, end in zip(ENDS, stated, strict=True):
        if size and isinstance(end, int) and end >= size:
            raise problem_in(header.path, key, f"is {end}; the vocabulary has {size} tokens")
    return sorted({end for end in stated if end is not None}, key=str)


def sampling(header: Header) -> dict[str, Any]:
    """The sampling parameters that the file recommends; its floats have seven digits."""
    stated = {name: header.value(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in stated.items()
        if value is not None
    }


def write_tokenizer(header: Header, made: Path) -> None:
    """tokenizer.json, its configuration and the chat template, as transformers makes them of the entries."""
    check_tokens(header)
    with scratch_folder() as folder, usable_tokenizer(header.path):
        alone = folder / "tokenizer.gguf"
        alone.write_bytes(entries_alone(header, [key for key in header.entries if key.startswith("tokenizer.")]))
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=alone.name)
        tokenizer.save_pretrained(made)
        check_tokenizer_files(made)


def check_tokens(header: Header) -> None:
    """Raise ConfigError for a vocabulary that has no merges, and would take too long to find them in."""
    if MERGES in header.entries:
        return
    cuts = sum(length**2 for length in lengths(header, TOKENS))
    if cuts > MOST_CUTS:
        raise problem_in(header.path, TOKENS, f"could be cut in {cuts} ways; without merges there may be {MOST_CUTS}")


def lengths(header: Header, key: str) -> Iterator[int]:
    """Of the texts of an array, in bytes. Raises ConfigError if it holds something else."""
    entry = header.entries[key]
    raw = header.bytes()[entry.start : entry.end]
    at = 8 + len(key.encode())
    kind, of, count = struct.unpack_from("<IIQ", raw, at)
    if (kind, of) != (ARRAY, STRING):
        raise problem_in(header.path, key, f"is {shown(header.value(key))}; it has to be a list of texts")
    at += 16
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", raw, at)
        yield length
        at += 8 + length
