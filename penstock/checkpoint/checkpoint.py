"""A checkpoint on disk or on the hub: its configuration, checked field by field, its defaults, and its weights."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
from penstock.checkpoint.look import HEAD, WRAPPED, even_split, is_wrapper, resolve, stated_config
from penstock.checkpoint.packed import FIELD, Method, PackedShards, method_of
from penstock.checkpoint.tensors import Shards, TextPart, Weights, layer_of
from penstock.core import ConfigError, RequestError, SamplingParams
from penstock.files import (
    CODE_FIELD,
    CONFIG_FILE,
    DTYPE_BYTES,
    GENERATION_FILE,
    code_refusal,
    eos_token_ids,
    fields_of,
    generation_eos,
    problem_in,
    read_json,
    said,
    scratch_folder,
    shown,
)

# -------------------------------------------------------------------------------------------------------- config fields
# Checks the values of config.json's fields. Errors name the file and the field.
#
# The classes of transformers check types. Most values they pass on, and what comes of a negative width or an unknown
# activation is an error of torch in the middle of building the model, which names no field, or NaN in every answer.

SIZES: Final = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Fields that every configuration has to have."""
LAYER_COUNTS: Final = ("n_layer", "n_layers")
"""Names of the number of layers that do not begin with ``num_``."""
MOST_PARTS: Final = 100_000
"""The most of anything that a configuration counts: layers, heads, experts, labels."""
MOST_TOKENS: Final = 1 << 21
"""The most tokens of a vocabulary. Known ones have up to 900,000. llguidance's form of a vocabulary takes 450 bytes a
token, set aside before any tensor is looked at, and cannot hold twice as many."""
ROPE_TABLES: Final = ("rope_parameters", "rope_scaling")
"""Fields that hold the parameters of rotary embeddings: today's, and the one of older files."""
PER_LAYER_TYPE: Final = re.compile(r"\w+_attention")
"""Fields of a rope table that are themselves tables, for layers of this type."""


def whole(value: Any, least: int) -> bool:
    """Whether a count is at least ``least``; lists with a number for each layer are left to transformers."""
    return not isinstance(value, str) and (type(value) is not int or value >= least)


def number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def above_0(value: Any) -> bool:
    return number(value) and value > 0


def all_above_0(value: Any) -> bool:
    """Whether a number is above 0. A list has one for each layer: 0 or null for a layer that rotates nothing."""
    if isinstance(value, list):
        return all(one is None or not_negative(one) for one in value)
    return above_0(value)


def not_negative(value: Any) -> bool:
    return number(value) and value >= 0


def share(value: Any) -> bool:
    return number(value) and 0 <= value <= 1


class Rule:
    """Conditions on the values of some fields; null, which stands for a default, is left to transformers."""

    def __init__(self, names: str, holds: Callable[[Any], bool], wanted: str) -> None:
        self.names = re.compile(names)
        self.holds = holds
        self.wanted = wanted


RULES: Final = (
    Rule(
        r"hidden_size|vocab_size|num_hidden_layers|intermediate_size|num_attention_heads|num_key_value_heads|head_dim"
        r"|global_head_dim|v_head_dim|(original_)?max_position_embeddings",
        lambda value: whole(value, 1),
        "a whole number above 0",
    ),
    Rule(
        r"\w+_(head_dim|lora_rank|intermediate_size)|n(um)?_\w*experts\w*|n_group|topk_group|n_shared_experts",
        lambda value: whole(value, 0),
        "a whole number, 0 or above",
    ),
    Rule(r"first_k_dense_replace", lambda value: type(value) is int, "a whole number"),
    Rule(r"(\w*_)?rope_theta", all_above_0, "a finite number, above 0"),
    Rule(r"\w*(_eps|_epsilon)", not_negative, "a finite number, 0 or above"),
    Rule(
        r"query_pre_attn_scalar|(attn|final)_logit_softcapping|attention_multiplier|logits_scaling",
        above_0,
        "a number above 0",
    ),
    Rule(r"hidden_dropout|attention_dropout|\w+_(dropout|pdrop)", share, "a number from 0 to 1"),
    Rule(
        r"hidden_act|hidden_activation|activation_function|mlp_hidden_act",
        lambda value: not isinstance(value, str) or value in ACT2FN,
        f"one of {', '.join(sorted(ACT2FN))}",
    ),
)
ROPE_TYPES: Final = ("default", *sorted(ROPE_INIT_FUNCTIONS))
ROPE_RULES: Final = (
    *RULES,
    Rule(r"rope_type", lambda value: value in ROPE_TYPES, f"one of {', '.join(ROPE_TYPES)}"),
    Rule(r"rope_theta", lambda value: value != 1, "another number than 1, of which every power is the same"),
    Rule(r"factor|beta_fast|beta_slow|\w+_freq_factor|original_max_position_embeddings", above_0, "a number above 0"),
    Rule(r"partial_rotary_factor", lambda value: above_0(value) and value <= 1, "a number above 0 and at most 1"),
)


# ------------------------------------------------------------------------------------------------------ as it is stated
# Checks of the file's own table, before transformers makes a class of it.


def check_stated(table: dict[str, Any], file: Path) -> None:
    """Raise ConfigError for a field of the file that describes no model, before any class is made of it."""
    check_model_type(table, file)
    check_counts(table, file)
    check_values(table, file)


def check_model_type(table: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError if only code of the checkpoint's own makes its model, or nobody knows it."""
    asked, model_type = table.get(CODE_FIELD), table.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    if asked:
        raise code_refusal(file, asked, f"model of type {shown(model_type)}")
    raise problem_in(file, "model_type", f"is {shown(model_type)}, which transformers does not know; a newer one may")


def check_counts(table: dict[str, Any], file: Path) -> None:
    """Raise ConfigError if a configuration counts more parts than any model has: its class may make a list of them."""
    for path, key, value in fields_of(table):
        counts = key.startswith("num_") or key in LAYER_COUNTS or (key.startswith("n_") and key.endswith("experts"))
        if counts and isinstance(value, int) and abs(value) > MOST_PARTS:
            raise problem_in(file, path, f"is {value}; no model has more than {MOST_PARTS}")


def check_values(table: Mapping[str, Any], file: Path, stated: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for a value that ``RULES`` refuse. Towers and quantisation are not looked at.

    ``stated`` is the file's own table, where ``table`` is transformers'.
    """
    for path, key, value, rules in fields_of_text(table):
        for rule in rules:
            if value is not None and rule.names.fullmatch(key) and not rule.holds(value):
                raise problem_in(
                    file, stated_path(path, stated or table), f"is {shown(value)}; it has to be {rule.wanted}"
                )


def fields_of_text(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str, Any, tuple[Rule, ...]]]:
    """Path, name and value of the fields of a language model, its part of a multimodal one included."""
    for key, value in table.items():
        if key in ROPE_TABLES and isinstance(value, dict):
            yield from fields_of_rope(value, f"{where}{key}.")
        elif key == WRAPPED and isinstance(value, dict):
            yield from fields_of_text(value, f"{where}{key}.")
        elif not isinstance(value, dict):
            yield f"{where}{key}", str(key), value, RULES


def fields_of_rope(table: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, Any, tuple[Rule, ...]]]:
    layered = Rule(PER_LAYER_TYPE.pattern, lambda value: isinstance(value, dict), "a table of rotary embeddings")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from fields_of_rope(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", str(key), value, (*ROPE_RULES, layered)


# ----------------------------------------------------------------------------------------------- as transformers has it
# Checks of the table that transformers makes of the file, whose defaults count, too.


def check_sizes(config: Any, stated: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError unless sizes are there and fields fit each other, defaults of transformers among them.

    ``stated`` is the table in the file.
    """
    for name in SIZES:
        size = getattr(config, name, None)
        if type(size) is not int or size < 1:
            raise problem_in(file, name, f"is {size!r}; it has to be a whole number above 0")
    if config.vocab_size > MOST_TOKENS:
        raise problem_in(file, "vocab_size", f"is {config.vocab_size}; a vocabulary may have {MOST_TOKENS} tokens")
    table = config.to_dict()
    check_values(table, file, stated)
    check_window(table, file)
    check_rope(table, file, stated)
    longest = table.get("max_position_embeddings")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise problem_in(file, "max_position_embeddings", f"is {longest!r}; it has to be a whole number above 0")
    turned, width = table.get("qk_rope_head_dim"), table.get("head_dim")
    if turned is not None and width not in (None, turned):
        raise problem_in(file, "head_dim", f"is {width}; it has to be that of qk_rope_head_dim, {turned}")


def check_window(table: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError if layers have a sliding window whose size is missing or below 1."""
    types, window = table.get("layer_types"), table.get("sliding_window")
    slides = "sliding_attention" in types if types else table.get("use_sliding_window", window is not None)
    if slides and (type(window) is not int or window < 1):
        raise problem_in(file, "sliding_window", f"is {shown(window)}; it has to be a number of tokens, 1 or more")


def stated_path(path: str, stated: Mapping[str, Any]) -> str:
    """The path of a field as the file has it: transformers moves rotary fields together, and renames some."""
    if not path.startswith(ROPE_TABLES[0]):
        return path
    field = path.rpartition(".")[2]
    own = next((name for name in ROPE_TABLES if isinstance(stated.get(name), dict)), ROPE_TABLES[0])
    rope = stated.get(own) or {}
    if field in stated and field not in rope:
        return field
    if field == "rope_type" and field not in rope and "type" in rope:
        path = f"{path.removesuffix(field)}type"
    return path.replace(ROPE_TABLES[0], own, 1)


def check_rope(table: Mapping[str, Any], file: Path, stated: Mapping[str, Any]) -> None:
    """Raise ConfigError if the kind or the base of rotary embeddings is null."""
    for path, key, value, _ in fields_of_text(table):
        if not path.startswith(ROPE_TABLES):
            continue
        if key == "rope_type" and value is None:
            raise problem_in(file, stated_path(path, stated), f"is null; it has to be one of {', '.join(ROPE_TYPES)}")
        if key == "rope_theta" and value is None and table.get("position_embedding_type", "rope") == "rope":
            raise problem_in(file, stated_path(path, stated), "is null; it has to be a finite number, above 0")


def without_value(table: Mapping[str, Any]) -> list[str]:
    """The fields that have a rule and are null, and the sizes that are not stated though the class has a default.

    Where a model cannot be built, one of them may be what it lacks.
    """
    null = [
        path
        for path, key, value, rules in fields_of_text(table)
        if value is None and any(rule.names.fullmatch(key) for rule in rules)
    ]
    model_type = table.get("model_type")
    known = CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
    defaults = {name: field.default for name, field in getattr(known, "__dataclass_fields__", {}).items()}
    unstated = (name for name, default in defaults.items() if name not in table and default is not None)
    return [*null, *filter(RULES[0].names.fullmatch, unstated)]


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
