"""A GGUF file's configuration, tokenizer and chat template as a Hugging Face folder without weights.

Code that reads a checkpoint's files finds them there: tokenizer, grammars, chat templates, recordings. The folder is
made once, in the cache of assets beside the hub's, under a name that is a hash of the file's header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import tokenizers
import transformers
from huggingface_hub import cached_assets_path

from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, GENERATION_FILE, problem_in
from penstock.models.gguf.accepted import check_accepted
from penstock.models.gguf.blocks import mapped
from penstock.models.gguf.config import config_table
from penstock.models.gguf.header import Header
from penstock.models.gguf.rotary import ROPE_TENSORS
from penstock.models.gguf.sampling import sampling
from penstock.models.gguf.sizes import EMBEDDING
from penstock.models.gguf.tokenizer import write_tokenizer
from penstock.models.gguf.vocabulary import TOKENS, Vocabulary, vocabulary_of
from penstock.scratch import scratch_folder
from penstock.text.tokenizer import usable_tokenizer
from penstock.text.tokenizer_bounds import check_tokenizer_files

LAYOUT: Final = 3
"""The version of these folders' contents. A new number makes them anew."""
MOST_FACTORS: Final = 1 << 20
"""Bytes; a larger tensor of rotary factors is refused."""


def folder_of(header: Header) -> Path:
    """The folder of an accepted file, made if it does not exist. Raises ConfigError for a file that cannot be read."""
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
    """``folder_of`` a file. If the block refuses the file, a folder that was new is removed."""
    place: Path = cached_assets_path("penstock", "gguf") / name_of(header)
    known = place.is_dir()
    folder = folder_of(header)
    try:
        yield folder
    except ConfigError as error:
        if not known:
            shutil.rmtree(folder, ignore_errors=True)
        # The user has never seen the folder, which may be gone.
        raise ConfigError(str(error).replace(str(folder / CONFIG_FILE), str(header.path))) from error


def name_of(header: Header) -> str:
    """The name of a file's folder: a hash of all that the folder is made from, and of the libraries' versions."""
    found = hashlib.sha256(f"{LAYOUT} {transformers.__version__} {tokenizers.__version__}\n".encode())
    found.update(header.bytes())
    for name in ROPE_TENSORS:
        info = header.tensors.get(name)
        if info is not None and info.nbytes <= MOST_FACTORS:  # a larger one is refused later
            found.update(mapped(info).numpy().tobytes())
    return found.hexdigest()[:32]


def make(header: Header, folder: Path) -> None:
    """Write the folder elsewhere, and rename it into place when complete: other processes may be making it, too."""
    with scratch_folder("new-", folder.parent) as new:
        made = new / "made"
        made.mkdir()
        vocabulary = vocabulary_of(header)
        table = config_table(header)
        check_embedded(header, vocabulary, table["vocab_size"])
        (made / CONFIG_FILE).write_text(json.dumps(table, indent=1))
        (made / GENERATION_FILE).write_text(json.dumps({"eos_token_id": vocabulary.ends, **sampling(header)}))
        with usable_tokenizer(header.path):
            write_tokenizer(header, vocabulary, made)
            check_tokenizer_files(made)
        try:
            # If another process was faster, its folder serves: the contents are the same.
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def check_embedded(header: Header, vocabulary: Vocabulary, rows: int) -> None:
    """Raise ConfigError if the vocabulary has tokens without a row in the embedding."""
    if len(vocabulary.tokens) > rows:
        raise problem_in(
            header.path,
            TOKENS,
            f"are {len(vocabulary.tokens)}, and {EMBEDDING} has {rows} rows: download the file again",
        )
