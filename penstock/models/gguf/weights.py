"""The tensors of a GGUF file under transformers' names, each read when it is used."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from penstock.core import ConfigError
from penstock.files import problem_in, said
from penstock.models.gate import model_class
from penstock.models.gguf.accepted import REMEDY
from penstock.models.gguf.blocks import FLOATS, OF_FOUR_BITS, READABLE, UNPACKERS, floats, grouped
from penstock.models.gguf.header import REQUANTISE, Header, TensorInfo
from penstock.models.gguf.rotary import ROPE_TENSORS
from penstock.models.quantization.grouped import GroupedWeight

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
