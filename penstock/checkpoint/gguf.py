"""A GGUF file as a Hugging Face folder, and its tensors under transformers' names."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from huggingface_hub import cached_assets_path
from torch import Tensor

from penstock.checkpoint.architectures import ModuleNames, model_class
from penstock.checkpoint.gguf_blocks import FLOATS, OF_FOUR_BITS, READABLE, UNPACKERS, floats, grouped, mapped
from penstock.checkpoint.gguf_config import EMBEDDING, OF_LAYER, REMEDY, ROPE_TENSORS, check_accepted, config_table
from penstock.checkpoint.gguf_header import REQUANTISE, Header, TensorInfo
from penstock.checkpoint.gguf_tokenizer import write_tokenizer
from penstock.checkpoint.gguf_vocabulary import TOKENS, Vocabulary, sampling, vocabulary_of
from penstock.checkpoint.tensors import GroupedWeight, StoredTensor, Weights, bits_of
from penstock.core import ConfigError, __version__
from penstock.files import CONFIG_FILE, GENERATION_FILE, problem_in, said, scratch_folder, stamp_of
from penstock.text.tokenizer import usable_tokenizer
from penstock.text.tokenizer_bounds import check_tokenizer_files

# ---------------------------------------------------------------------------------------------------------------- known
# What transformers' classes have once told about a GGUF file, kept beside the folder that was made of the file.
#
# Importing transformers takes longer than all else that a small model's start does. What it says of a file depends on
# the file's header and on versions: it is asked once, and later starts read the answer. A record that is damaged, or of
# another version, file or question, counts as none.

FACTS_LAYOUT: Final = 1
"""Version of the records' layout; a new number lets all older records count as none."""
MOST_RECORD: Final = 1 << 26
"""Bytes of the largest record; a larger file is none. A record is read whole, so this bounds the memory that a wrong
file can take."""
MODEL: Final = "model"
"""The name of the record of a whole model."""

Kind = TypeVar("Kind")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file whose whole model transformers has built, without weights, and found complete.

    All its layers have the parts of llama's, and silu.
    """

    config: dict[str, Any]
    """Every field of the configuration, the defaults of its class among them."""
    parts: ModuleNames
    names: dict[str, str]
    """GGUF's name -> transformers', for layer 0 and everything outside of layers."""
    biases: dict[str, tuple[int, ...]]
    """The shapes of layer 0's biases."""
    interleaved: dict[str, int]
    """Part of a layer (``attn_q``) -> its number of heads, where llama.cpp stores a head's rows in another order."""

    def fields(self) -> SimpleNamespace:
        """The configuration's fields as attributes."""
        return SimpleNamespace(**self.config)


@cache
def version(package: str) -> str:
    """The version of an installed package. Its metadata is read once: that takes longer than to hash a small file."""
    return metadata.version(package)


def versions() -> str:
    """The versions of the packages on which records depend, told without importing any of them."""
    return f"{FACTS_LAYOUT} {__version__} {version('transformers')} {version('tokenizers')} {version('torch')}"


def question(folder: Path, files: Iterable[Path], *about: object) -> str:
    """A text that stands for a question ``about`` a GGUF file with this ``folder`` and these ``files``.

    It is another one as soon as a version, the configuration or one of the files is. Raises OSError for a missing file.
    """
    stated = hashlib.sha256((folder / CONFIG_FILE).read_bytes()).hexdigest()
    return f"{versions()} {stated} {[stamp_of(file) for file in files]} {about}"


def record_of(folder: Path, name: str) -> Path:
    """The file of a record. It is beside the ``folder`` made of a GGUF file, which others read as a checkpoint."""
    return folder.parent.with_name("known") / folder.name / name


def recall(file: Path, asked: str, kind: type[Kind]) -> Kind | None:
    """The record in ``file`` if it answers this very question, else None."""
    try:
        if file.stat().st_size > MOST_RECORD:
            return None
        digest, _, told = file.read_bytes().partition(b"\n")
        return msgspec.json.decode(told, type=kind) if digest == seal(asked, told) else None
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def keep(file: Path, asked: str, known: Any) -> None:
    """Write the record that answers a question. Where the folder cannot be written to, there is none."""
    told = msgspec.json.encode(known)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written elsewhere and renamed: other processes may be reading or writing the same record.
        with scratch_folder("new-", file.parent) as folder:
            made = folder / file.name
            made.write_bytes(seal(asked, told) + b"\n" + told)
            made.rename(file)


def seal(asked: str, told: bytes) -> bytes:
    """The first line of a record: a hash by which both its question and its contents are recognised."""
    return hashlib.sha256(asked.encode() + b"\n" + told).hexdigest().encode()


# --------------------------------------------------------------------------------------------------------------- folder
# A GGUF file's configuration, tokenizer and chat template as a Hugging Face folder without weights.
#
# Code that reads a checkpoint's files finds them there: tokenizer, grammars, chat templates, recordings. The folder is
# made once, in the cache of assets beside the hub's, under a name that is a hash of the file's header.

LAYOUT: Final = 3
"""Version of these folders' contents; a new number has them made anew."""
MOST_FACTORS: Final = 1 << 20
"""Bytes of the largest tensor of rotary factors; a larger one is refused. The tensor is hashed before it is checked;
``gguf_config.MOST_FACTORS`` numbers take 0.4 MB in float32."""


def folder_of(header: Header) -> Path:
    """The folder of an accepted file, made if it does not exist. Raises ConfigError for a file that cannot be read."""
    check_accepted(header)
    folder = place_for(header)
    with keeping(header):
        if not folder.is_dir():
            make(header, folder)
    return folder


def place_for(header: Header) -> Path:
    """The place of a file's folder, whether it has been made or not. Raises ConfigError like ``folder_of``."""
    with keeping(header):
        place: Path = cached_assets_path("penstock", "gguf") / name_of(header)
    return place


@contextlib.contextmanager
def keeping(header: Header) -> Iterator[None]:
    """Raise ConfigError where a file's folder cannot be made within the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"model: {header.path}: its tokenizer cannot be kept: {error}; set HF_ASSETS_CACHE to a folder that can be "
            "written to"
        ) from error


@contextlib.contextmanager
def folder_for(header: Header) -> Iterator[Path]:
    """``folder_of`` a file. If the block refuses the file, a folder that was new is removed."""
    known = place_for(header).is_dir()
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
    found = hashlib.sha256(f"{LAYOUT} {version('transformers')} {version('tokenizers')}\n".encode())
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


# -------------------------------------------------------------------------------------------------------------- weights
# The tensors of a GGUF file under transformers' names, each read when it is used.

LAYER: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.")
"""The beginning of a GGUF tensor's name that says its layer."""
FIRST: Final = ".layers.0."
"""The part of transformers' names that says layer 0."""
FORMATS: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Format -> safetensors' name for it."""


def gguf_tensor(info: TensorInfo, order: Order) -> StoredTensor:
    """A tensor of a GGUF file; blocks are read as float32, or as the integers that they hold."""

    def arranged(rows: Tensor) -> Tensor:
        """Rows in transformers' form: llama.cpp reorders those of queries and keys, and adds 1 to gemma's norms."""
        # Vectors may be gemma's norms, from which 1 is taken: that takes floats.
        if rows.dim() == 1:
            rows = rows.float()
        # numpy has no bfloat16; moving rows does not care what their bits mean.
        bits = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
        found = order(bits.numpy(), info.name)
        return torch.from_numpy(found).contiguous().view(rows.dtype)

    def arranged_groups() -> GroupedWeight:
        # Scales and minimums belong to rows, too, and move with them.
        found = grouped(info)
        minimums = None if found.minimums is None else arranged(found.minimums)
        return GroupedWeight(arranged(found.values), arranged(found.scales), minimums, found.bits, found.group)

    return StoredTensor(
        info.file,
        info.name,
        info.shape,
        FORMATS[FLOATS.get(info.kind, torch.float32)],
        lambda index: arranged(floats(info))[index],
        arranged_groups if info.kind in UNPACKERS else None,
        None if info.kind in FLOATS else 4 if info.kind in OF_FOUR_BITS else 8,
    )


def zero_bias(file: Path, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Zeros in place of a bias that one layer of the file lacks and others have."""
    return StoredTensor(file, name, shape, FORMATS[torch.float32], lambda index: torch.zeros(shape)[index])


def files_of(header: Header) -> list[Path]:
    """The file, or all that it is split over."""
    return sorted({header.path, *(info.file for info in header.tensors.values())})


class GgufWeights(Weights):
    """The weights of a GGUF file. Raises ConfigError for tensors that no part of the model takes."""

    def __init__(self, header: Header, config: Any, known: Known | None = None) -> None:
        self._files = files_of(header)
        self.first, self.biases = names_of_one_layer(header, config) if known is None else (known.names, known.biases)
        self.interleaved: dict[str, int] | None
        """The parts whose rows are in another order; None if more is done to the tensors."""
        if known is not None:
            self.interleaved = known.interleaved
        else:
            theirs = order_of(header, config)
            self.interleaved = interleaved_parts(theirs, header, config)
        order: Order = theirs if self.interleaved is None else partial(in_order, self.interleaved)
        found, zeros = named(header, config, self.first, self.biases)
        self._tensors = {name: gguf_tensor(info, order) for name, info in found.items()}
        self._tensors |= {name: zero_bias(header.path, name, shape) for name, shape in zeros.items()}

    @property
    def files(self) -> list[Path]:
        return self._files

    @property
    def bits(self) -> int | None:
        return bits_of(self._tensors.values())

    def names(self) -> list[str]:
        return list(self._tensors)

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        """Name -> tensor, not read yet; each maps its part of the file when it is read."""
        return {name: self._tensors[name] for name in names}


Order = Callable[[np.ndarray, str], np.ndarray]
"""(tensor as the file has it, its name) -> the tensor in transformers' form"""


def order_of(header: Header, config: Any) -> Order:
    """The form that transformers gives the tensors of this architecture."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=heads)

    def order(rows: np.ndarray, name: str) -> np.ndarray:
        found: np.ndarray = processor.process(weights=rows, name=name).weights
        return found

    return order


def in_order(interleaved: Mapping[str, int], rows: np.ndarray, name: str) -> np.ndarray:
    """The tensor with each head's rows in two halves, of which llama.cpp stores a row each in turn."""
    part = OF_LAYER.fullmatch(name)
    if part is None or part[1] not in interleaved:
        return rows
    heads = interleaved[part[1]]
    return rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def interleaved_parts(theirs: Order, header: Header, config: Any) -> dict[str, int] | None:
    """The parts of a layer whose rows ``theirs`` orders as ``in_order`` does; None if it does anything else.

    It is tried with numbered rows, for the tensors of layer 0 and those outside of layers.
    """
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found: dict[str, int] = {}
    for name, info in header.tensors.items():
        layer = LAYER.match(name)
        if layer is not None and layer[1] != "0":
            continue
        rows = np.arange(info.shape[0], dtype=np.float32).reshape(-1, *[1] * (len(info.shape) - 1))
        wanted, part = theirs(rows.copy(), name), OF_LAYER.fullmatch(name)
        if part is not None and part[1] in heads and not np.array_equal(wanted, rows):
            found[part[1]] = int(heads[part[1]])
        if not np.array_equal(in_order(found, rows, name), wanted):
            return None
    return found


def named(
    header: Header, config: Any, first: Mapping[str, str], biases: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorInfo], dict[str, tuple[int, ...]]]:
    """The tensors under transformers' names, and the shapes of biases that only some layers have.

    ``first`` and ``biases``: see ``names_of_one_layer``.
    """
    found = {}
    for name, info in header.tensors.items():
        if name in ROPE_TENSORS:
            continue
        if info.kind not in READABLE:
            raise problem_in(
                header.path,
                name,
                f"is stored as {info.kind.name}; {', '.join(kind.name for kind in READABLE)} can be read: {REQUANTISE}",
            )
        layer = LAYER.match(name)
        # Layers are alike: ``first`` names those of layer 0, whose number is then replaced.
        known = first.get(f"blk.0.{name[layer.end() :]}" if layer else name)
        if known is None:
            raise problem_in(header.path, name, f"is no part of a {config.model_type} as transformers has it: {REMEDY}")
        found[known.replace(FIRST, f".layers.{layer[1]}.") if layer else known] = info
    each = [
        (name.replace(FIRST, f".layers.{layer}."), shape)
        for name, shape in biases.items()
        for layer in range(config.num_hidden_layers)
    ]
    return found, {name: shape for name, shape in each if name not in found}


def names_of_one_layer(header: Header, config: Any) -> tuple[Mapping[str, str], dict[str, tuple[int, ...]]]:
    """GGUF's name -> transformers' name, for layer 0 and everything outside of layers; its biases' shapes."""
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = one.layer_types[:1]
    try:
        with torch.device("meta"):
            model = model_class(config)(one)
        found: Mapping[str, str] = get_gguf_hf_weights_map(model, TensorProcessor())
        biases = {name: tuple(one.shape) for name, one in model.named_parameters() if name.endswith(".bias")}
    except Exception as error:
        raise ConfigError(f"model: {header.path} describes a model that cannot be built: {said(error)}") from error
    return found, {name: shape for name, shape in biases.items() if FIRST in name}
