"""A GGUF file as a Hugging Face folder, and its tensors under transformers' names."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
import transformers
from huggingface_hub import cached_assets_path
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from penstock.checkpoint.gate import model_class
from penstock.checkpoint.gguf_blocks import FLOATS, OF_FOUR_BITS, READABLE, UNPACKERS, floats, grouped, mapped
from penstock.checkpoint.gguf_config import EMBEDDING, REMEDY, ROPE_TENSORS, check_accepted, config_table
from penstock.checkpoint.gguf_header import REQUANTISE, Header, TensorInfo
from penstock.checkpoint.gguf_tokenizer import write_tokenizer
from penstock.checkpoint.gguf_vocabulary import TOKENS, Vocabulary, sampling, vocabulary_of
from penstock.checkpoint.tensors import GroupedWeight
from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, GENERATION_FILE, problem_in, said, scratch_folder
from penstock.text.tokenizer import usable_tokenizer
from penstock.text.tokenizer_bounds import check_tokenizer_files

# --------------------------------------------------------------------------------------------------------------- folder
# A GGUF file's configuration, tokenizer and chat template as a Hugging Face folder without weights.
#
# Code that reads a checkpoint's files finds them there: tokenizer, grammars, chat templates, recordings. The folder is
# made once, in the cache of assets beside the hub's, under a name that is a hash of the file's header.

LAYOUT: Final = 3
"""The version of these folders' contents. A new number makes them anew."""
MOST_FACTORS: Final = 1 << 20
"""Bytes; a larger tensor of rotary factors is refused."""


def folder_of(header: Header) -> Path:
    """The folder of an accepted file, made if it does not exist. Raises ConfigError for a file that cannot be read."""
    check_accepted(header)
    with keeping(header):
        folder: Path = cached_assets_path("penstock", "gguf") / name_of(header)
        if not folder.is_dir():
            make(header, folder)
    return folder


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
    with keeping(header):
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


# -------------------------------------------------------------------------------------------------------------- weights
# The tensors of a GGUF file under transformers' names, each read when it is used.

LAYER: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.")
FIRST: Final = ".layers.0."
FORMATS: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Format -> safetensors' name for it."""


class GgufTensor:
    """A tensor that has not been read; ``tensor[...]`` reads it, as for safetensors' slices."""

    def __init__(self, info: TensorInfo, processor: TensorProcessor) -> None:
        self._info = info
        self._processor = processor

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The format that reading gives; blocks become float32."""
        return FORMATS[FLOATS.get(self._info.kind, torch.float32)]

    def __getitem__(self, _: Any) -> Tensor:
        return self._arranged(floats(self._info))

    @property
    def is_grouped(self) -> bool:
        """Whether it is stored as whole numbers with scales, which can be used unchanged."""
        return self._info.kind in UNPACKERS

    def grouped(self) -> GroupedWeight:
        """A matrix [out, in] that ``is_grouped``, as it is stored."""
        found = grouped(self._info)
        minimums = None if found.minimums is None else self._arranged(found.minimums)
        return GroupedWeight(
            self._arranged(found.values), self._arranged(found.scales), minimums, found.bits, found.group
        )

    def _arranged(self, rows: Tensor) -> Tensor:
        """In transformers' form: llama.cpp permutes the rows of queries and keys, and adds 1 to gemma's norms."""
        if rows.dim() == 1:
            rows = rows.float()  # the processor may add to a norm
        bits = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows  # numpy has no bfloat16
        found = self._processor.process(weights=bits.numpy(), name=self._info.name).weights
        return torch.from_numpy(found).contiguous().view(rows.dtype)


class ZeroBias:
    """Zeros in place of a bias that one layer of the file lacks and others have."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return FORMATS[torch.float32]

    def __getitem__(self, _: Any) -> Tensor:
        return torch.zeros(self._shape)

    is_grouped = False


class GgufWeights:
    """The weights of a GGUF file. Raises ConfigError for tensors that no part of the model takes."""

    def __init__(self, header: Header, config: Any) -> None:
        self._path = header.path
        heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
        self._processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=heads)
        self._tensors, self._zeros = named(header, config)

    @property
    def files(self) -> list[Path]:
        return sorted({self._path, *(info.file for info in self._tensors.values())})

    @property
    def bits(self) -> int | None:
        """The bits of most weights that are whole numbers, 4 or 8; None where all weights are floats."""
        whole = [info for info in self._tensors.values() if info.kind not in FLOATS]
        four = sum(prod(info.shape) for info in whole if info.kind in OF_FOUR_BITS)
        return None if not whole else 4 if 2 * four > sum(prod(info.shape) for info in whole) else 8

    def names(self) -> list[str]:
        return [*self._tensors, *self._zeros]

    def sizes(self) -> dict[str, int]:
        """Name -> number of elements, for every tensor."""
        shapes = {name: info.shape for name, info in self._tensors.items()} | self._zeros
        return {name: prod(shape) for name, shape in shapes.items()}

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, GgufTensor | ZeroBias]:
        """Name -> tensor, not read yet; each maps its part of the file when it is read."""
        return {name: self._tensor(name) for name in names}

    def _tensor(self, name: str) -> GgufTensor | ZeroBias:
        if name in self._zeros:
            return ZeroBias(self._zeros[name])
        return GgufTensor(self._tensors[name], self._processor)


def named(header: Header, config: Any) -> tuple[dict[str, TensorInfo], dict[str, tuple[int, ...]]]:
    """The tensors under transformers' names, and the shapes of biases that only some layers have."""
    first, biases = names_of_one_layer(header, config)
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
