"""A checkpoint on disk or on the hub: its configuration, its defaults, and how to split its layers."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from transformers import CONFIG_MAPPING, AutoConfig

from penstock.core import ConfigError, RequestError, SamplingParams
from penstock.dtypes import DTYPE_BYTES
from penstock.files import (
    CODE_FIELD,
    CONFIG_FILE,
    GENERATION_FILE,
    code_refusal,
    eos_token_ids,
    fields_of,
    generation_eos,
    problem_in,
    read_json,
    said,
    shown,
)
from penstock.models.gate import Parts, check_supported, text_config
from penstock.models.gguf.folder import folder_for
from penstock.models.gguf.header import read_header
from penstock.models.gguf.weights import GgufWeights
from penstock.models.glance import stated_config
from penstock.models.places import resolve
from penstock.models.prequantized.methods import FIELD, method_of
from penstock.models.prequantized.parts import Method
from penstock.models.prequantized.weights import PackedShards
from penstock.models.shards import Shards, layer_of
from penstock.models.split import even_split
from penstock.models.text_part import HEAD, TextPart, Weights, is_wrapper

SIZES: Final = ("num_hidden_layers", "hidden_size", "vocab_size")
LAYER_COUNTS: Final = ("n_layer", "n_layers")
DTYPE_FIELDS: Final = frozenset({"dtype", "torch_dtype"})
FORMAT_NAMES: Final = {
    **dict.fromkeys(("fp16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("fp32", "float"), "float32"),
    **dict.fromkeys(("fp64", "double"), "float64"),
}
"""Other names of formats."""
OTHER_FLOATS: Final = ("float64", "float8_e4m3fn", "float8_e5m2")
"""Formats that a configuration may name and nothing is computed in."""
MOST_PARTS: Final = 100_000
"""Of anything that a configuration counts: layers, heads, experts, labels."""
SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Checkpoint:
    """A supported checkpoint. ``source`` is what names it: its folder, or its GGUF file.

    Of a multimodal one, ``weights`` and ``config`` are those of the text part.
    ``path`` is the folder of its configuration and tokenizer. ``sampling_defaults`` are the sampling parameters of its
    generation_config; ``eos_token_ids`` end a text.
    """

    source: Path
    path: Path
    weights: Weights
    config: Any
    parts: Parts
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def dtype(self) -> str:
        """The format that its configuration names, if a model can compute in it; float32 where it names none."""
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

    Raises ConfigError for what is missing, unreadable or not supported, for a configuration that its own shards belie,
    and for a checkpoint that asks for code of its own.
    """
    source = resolve(model, revision)
    if source.is_file():
        header = read_header(source)
        with folder_for(header) as path:
            config, parts, _ = _configuration(path)
            weights: Weights = GgufWeights(header, config)
    else:
        path = source
        config, parts, method = _configuration(path)
        weights = Shards(path) if method is None else PackedShards(path, method)
        if is_wrapper(stated_config(path)):
            weights = TextPart(weights)
            config.tie_word_embeddings &= f"{HEAD}.weight" not in weights.names()
    check_layers(config.num_hidden_layers, weights.names(), path / CONFIG_FILE)
    generation = read_json(path / GENERATION_FILE)
    eos, sampling = _eos_ids(config, path), _sampling_defaults(generation, path)
    return Checkpoint(source, path, weights, config, parts, eos, sampling)


def _configuration(path: Path) -> tuple[Any, Parts, Method | None]:
    """What config.json in the folder says, where the parts of that architecture are, and how weights are packed."""
    file, stated = path / CONFIG_FILE, stated_config(path)
    check_model_type(stated, file)
    check_counts(stated, file)
    method = method_of(stated, file)
    try:
        config = with_torch_formats(path, stated)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model: {file} cannot be used: {said(error)}") from error
    if hasattr(config, FIELD):
        del config.quantization_config  # what it says is followed here: transformers is given floats
    config = text_config(config)
    parts = check_supported(config)
    check_sizes(config, file)
    return config, parts, method


def with_torch_formats(path: Path, stated: dict[str, Any]) -> Any:
    """The configuration in the folder. transformers' class takes formats by torch's names alone, and others are usual.

    "auto" is as if none were named. Raises ConfigError, which names the field, for what is no format of floats.
    """
    table = copy.deepcopy(stated)
    changed = False
    for where in (table, *(one for one in table.values() if isinstance(one, dict))):
        for name in DTYPE_FIELDS & where.keys():
            if isinstance(where[name], str) and where[name] not in DTYPE_BYTES:
                changed = True
                where[name] = torch_format(where[name], name, path / CONFIG_FILE)
    if not changed:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(table))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def torch_format(named: str, field: str, file: Path) -> str | None:
    name = named.removeprefix("torch.")
    if name == "auto":
        return None
    found = FORMAT_NAMES.get(name, name)
    if found not in (*DTYPE_BYTES, *OTHER_FLOATS):
        raise problem_in(file, field, f"is {shown(named)}; it has to be auto or one of {', '.join(DTYPE_BYTES)}")
    return found


def check_model_type(table: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError if only code of the checkpoint's own makes its model."""
    asked, model_type = table.get(CODE_FIELD), table.get("model_type")
    if asked and not (isinstance(model_type, str) and model_type in CONFIG_MAPPING):
        raise code_refusal(file, asked, f"model of type {shown(model_type)}")


def check_counts(table: dict[str, Any], file: Path) -> None:
    """Raise ConfigError if a configuration counts more parts than any model has: its class may make a list of them."""
    for path, key, value in fields_of(table):
        counts = key.startswith("num_") or key in LAYER_COUNTS or (key.startswith("n_") and key.endswith("experts"))
        if counts and isinstance(value, int) and abs(value) > MOST_PARTS:
            raise problem_in(file, path, f"is {value}; no model has more than {MOST_PARTS}")


def check_sizes(config: Any, file: Path) -> None:
    """Raise ConfigError unless the sizes that everything here reckons with are whole numbers above 0."""
    for name in SIZES:
        size = getattr(config, name, None)
        if type(size) is not int or size < 1:
            raise problem_in(file, name, f"is {size!r}; it has to be a whole number above 0")
    check_numbers(config, file)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and (type(longest) is not int or longest < 1):
        raise problem_in(file, "max_position_embeddings", f"is {longest!r}; it has to be a whole number above 0")


def check_numbers(config: Any, file: Path) -> None:
    """Raise ConfigError unless epsilons are finite and not below 0, and the bases of rotary embeddings above 0.

    A list has a base for every layer (``layer_rope_theta``), 0 or none for one that turns nothing.
    """
    for path, key, value in fields_of(config.to_dict()):
        base, epsilon = str(key).endswith("rope_theta"), str(key).endswith(("_eps", "_epsilon"))
        if value is None or not (base or epsilon) or isinstance(value, dict):
            continue
        of_layers = base and isinstance(value, list)
        numbers = [number for number in value if number is not None] if of_layers else [value]
        known = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        if not known or min(numbers, default=0) < 0 or (base and not of_layers and value == 0):
            wanted = "above 0" if base else "0 or above"
            raise problem_in(file, path, f"is {value!r}; it has to be a finite number, {wanted}")


def check_layers(stated: int, names: Iterable[str], file: Path) -> None:
    """Raise ConfigError if the tensors are of fewer layers than ``file`` states; there may be others beside them."""
    held = {layer_of(name) for name in names} - {None}
    if stated > len(held):
        raise problem_in(file, "num_hidden_layers", f"is {stated}, but the shards hold {len(held)} layers")


def _eos_ids(config: Any, path: Path) -> tuple[int, ...]:
    """What ends a text. Raises ConfigError for ids that are none, or not in the vocabulary."""
    file, ids = path / GENERATION_FILE, generation_eos(path)
    if not ids:
        file = path / CONFIG_FILE
        ids = eos_token_ids(getattr(config, "eos_token_id", None), file)
    if beyond := [token for token in ids if token >= config.vocab_size]:
        raise problem_in(file, "eos_token_id", f"is {beyond[0]}; the vocabulary has {config.vocab_size} tokens")
    return ids


def _sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The checkpoint's recommended sampling, as SamplingParams names it; ``do_sample`` false means greedy.

    Raises ConfigError for what SamplingParams refuses.
    """
    named = {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:  # greedy, which the penalty is for as well
        named = {"temperature": 0.0} | {name: named[name] for name in named.keys() & {"repetition_penalty"}}
    try:
        SamplingParams(**named)
    except RequestError as error:
        raise ConfigError(f"model: {path / GENERATION_FILE}: {error}") from error
    return named
