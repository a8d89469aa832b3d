"""A checkpoint on disk or on the hub: its configuration, checked field by field, its defaults, and its weights."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.architectures import ModuleNames, check_supported, text_config
from penstock.checkpoint.gguf import (
    MODEL,
    GgufWeights,
    Known,
    files_of,
    folder_for,
    keep,
    place_for,
    question,
    recall,
    record_of,
)
from penstock.checkpoint.gguf_header import Header, read_header
from penstock.checkpoint.look import HEAD, even_split, is_wrapper, resolve, stated_config
from penstock.checkpoint.packed import FIELD, Method, PackedShards, method_of
from penstock.checkpoint.tensors import Shards, TextPart, Weights, layer_of
from penstock.core import ConfigError, RequestError, SamplingParams
from penstock.files import (
    CONFIG_FILE,
    DTYPE_BYTES,
    GENERATION_FILE,
    eos_token_ids,
    generation_eos,
    problem_in,
    read_json,
    said,
    scratch_folder,
    shown,
)

# ----------------------------------------------------------------------------------------------------------- checkpoint
# A checkpoint as everything else sees it, opened without reading weights.

DTYPE_FIELDS: Final = frozenset({"dtype", "torch_dtype"})
"""Fields that name a format of numbers: today's name, and that of older files."""
FORMAT_NAMES: Final = {
    **dict.fromkeys(("fp16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("fp32", "float"), "float32"),
    **dict.fromkeys(("fp64", "double"), "float64"),
}
"""Other names of formats -> torch's names."""
OTHER_FLOATS: Final = ("float64", "float8_e4m3fn", "float8_e5m2")
"""Formats that a configuration may name though no model computes in them."""
SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are followed."""


@dataclass(frozen=True)
class Checkpoint:
    """A supported checkpoint. ``source`` names it: its folder, or its GGUF file.

    ``weights`` and ``config`` of a multimodal checkpoint are those of the text part. ``path`` is the folder of its
    configuration and tokenizer. ``sampling_defaults`` are the sampling parameters of its generation_config;
    ``eos_token_ids`` end a text.
    """

    source: Path
    path: Path
    weights: Weights
    config: Any
    parts: ModuleNames
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    known: Known | None = None
    """The record of a GGUF file that has been loaded before: ``config`` then has the fields, and no class."""

    @cached_property
    def transformers_config(self) -> Any:
        """The configuration as an object of transformers' class."""
        return self.config if self.known is None else _configuration(self.path)[0]

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def dtype(self) -> str:
        """The format that the configuration names, if a model can compute in it; float32 if not, or without one."""
        named = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
        return named if named in DTYPE_BYTES else "float32"

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    def even_split(self, stages: int) -> list[tuple[int, int]]:
        """Split the layers evenly by parameters, the head counting for the last stage; see ``even_split``."""
        sizes = self.weights.sizes()
        layers = sum(size for name, size in sizes.items() if layer_of(name) is not None)
        head = self.vocab_size * self.hidden_size
        return even_split(self.num_layers, stages, head_layers=head * self.num_layers / max(layers, 1))


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Read everything but the weights.

    Raises ConfigError for files that are missing, unreadable or not supported, for a configuration that its own shards
    contradict, and for a checkpoint that needs code of its own.
    """
    source, known = resolve(model, revision), None
    if source.is_file():
        header = read_header(source)
        known = known_of(header)
        if known is not None:
            path, config, parts = place_for(header), known.fields(), known.parts
            weights: Weights = GgufWeights(header, config, known)
        else:
            with folder_for(header) as path:
                config, parts, _ = _configuration(path)
                weights = GgufWeights(header, config)
    else:
        path = source
        config, parts, method = _configuration(path)
        weights = Shards(path) if method is None else PackedShards(path, method)
        if is_wrapper(stated_config(path)):
            weights = TextPart(weights)
            # A head that the text part stores is used, whatever the wrapper says of tying.
            config.tie_word_embeddings &= f"{HEAD}.weight" not in weights.names()
    check_layers(config.num_hidden_layers, weights.names(), path / CONFIG_FILE)
    generation = read_json(path / GENERATION_FILE)
    eos, sampling = _eos_ids(config, path), _sampling_defaults(generation, path)
    return Checkpoint(source, path, weights, config, parts, eos, sampling, known)


def known_of(header: Header) -> Known | None:
    """The record of a GGUF file; None if it has not been loaded yet, or by another version."""
    folder = place_for(header)
    try:
        return recall(record_of(folder, MODEL), question(folder, files_of(header)), Known)
    except OSError:
        return None


def is_known(model: str) -> bool:
    """Whether ``model`` is a GGUF file that can be loaded without transformers."""
    with contextlib.suppress(ConfigError):
        return Path(model).is_file() and known_of(read_header(Path(model))) is not None
    return False


def remember(checkpoint: Checkpoint) -> None:
    """Keep a record of a GGUF file of which transformers has built a whole model, of llama's form; see ``Known``."""
    weights = checkpoint.weights
    if not isinstance(weights, GgufWeights) or weights.interleaved is None:
        return
    found = Known(
        config=checkpoint.transformers_config.to_dict(),
        parts=checkpoint.parts,
        names=dict(weights.first),
        biases=dict(weights.biases),
        interleaved=weights.interleaved,
    )
    with contextlib.suppress(OSError):  # a file or the folder is gone
        keep(record_of(checkpoint.path, MODEL), question(checkpoint.path, weights.files), found)


def _configuration(path: Path) -> tuple[Any, ModuleNames, Method | None]:
    """The configuration in a folder, the names of the architecture's parts, and the method that packed the weights."""
    from penstock.checkpoint.config_fields import check_sizes, check_stated  # which import transformers

    file, stated = path / CONFIG_FILE, stated_config(path)
    check_stated(stated, file)
    method = method_of(stated, file)
    try:
        config = with_torch_formats(path, stated)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model: {file} cannot be used: {said(error)}{empty_fields(stated)}") from error
    # Packed weights are unpacked here: transformers, which is given floats, must not try it.
    if hasattr(config, FIELD):
        del config.quantization_config
    config = text_config(config)
    parts = check_supported(config)
    check_sizes(config, stated, file)
    return config, parts, method


def empty_fields(stated: Mapping[str, Any]) -> str:
    """Words for the end of an error about a configuration: the null fields, of which one may be what it lacks."""
    from penstock.checkpoint.config_fields import without_value

    names = without_value(stated)
    return f"; it has no value for {', '.join(names)}" if names else ""


def with_torch_formats(path: Path, stated: dict[str, Any]) -> Any:
    """The configuration in the folder, with formats renamed: transformers' class accepts only torch's names.

    "auto" counts as naming none. Raises ConfigError, which names the field, for anything but a float format.
    """
    from transformers import AutoConfig

    # A changed table is written to a folder of its own: transformers reads configurations from folders alone.
    table = copy.deepcopy(stated)
    changed = False
    for where in (table, *(one for one in table.values() if isinstance(one, dict))):
        for name in DTYPE_FIELDS & where.keys():
            if isinstance(where[name], str) and where[name] not in DTYPE_BYTES:
                changed = True
                where[name] = torch_format(where[name], name, path / CONFIG_FILE)
    if not changed:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    with scratch_folder() as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(table))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def torch_format(named: str, field: str, file: Path) -> str | None:
    """Torch's name of a format that a configuration names; None for "auto"."""
    name = named.removeprefix("torch.")
    if name == "auto":
        return None
    found = FORMAT_NAMES.get(name, name)
    if found not in (*DTYPE_BYTES, *OTHER_FLOATS):
        raise problem_in(file, field, f"is {shown(named)}; it has to be auto or one of {', '.join(DTYPE_BYTES)}")
    return found


def check_layers(stated: int, names: Iterable[str], file: Path) -> None:
    """Raise ConfigError if the tensors belong to fewer layers than ``file`` states; more are allowed."""
    held = {layer_of(name) for name in names} - {None}
    if stated > len(held):
        raise problem_in(file, "num_hidden_layers", f"is {stated}, but the shards hold {len(held)} layers")


def _eos_ids(config: Any, path: Path) -> tuple[int, ...]:
    """The tokens that end a text. Raises ConfigError for ids that are not valid, or not in the vocabulary."""
    file, ids = path / GENERATION_FILE, generation_eos(path)
    if not ids:
        file = path / CONFIG_FILE
        ids = eos_token_ids(getattr(config, "eos_token_id", None), file)
    if beyond := [token for token in ids if token >= config.vocab_size]:
        raise problem_in(file, "eos_token_id", f"is {beyond[0]}; the vocabulary has {config.vocab_size} tokens")
    return ids


def _sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The checkpoint's recommended sampling, under SamplingParams' names; ``do_sample`` false means greedy.

    Raises ConfigError for values that SamplingParams refuses.
    """
    named = {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:  # greedy decoding uses the repetition penalty, too
        named = {"temperature": 0.0} | {name: named[name] for name in named.keys() & {"repetition_penalty"}}
    try:
        SamplingParams(**named)
    except RequestError as error:
        raise ConfigError(f"model: {path / GENERATION_FILE}: {error}") from error
    return named
