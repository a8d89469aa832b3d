"""Checks the values of config.json's fields. Errors name the file and the field.

The classes of transformers check types. Most values they pass on, and what comes of a negative width or an unknown
activation is an error of torch in the middle of building the model, which names no field, or NaN in every answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.checkpoint.look import WRAPPED
from penstock.files import CODE_FIELD, code_refusal, fields_of, problem_in, shown

SIZES: Final = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Fields that every configuration has to have."""
LAYER_COUNTS: Final = ("n_layer", "n_layers")
"""Names of the number of layers that do not begin with ``num_``."""
MOST_PARTS: Final = 100_000
"""The most of anything that a configuration counts: layers, heads, experts, labels. A configuration's class may make a
list with an entry for each, so that a larger number would take memory before anything else is checked; models have
hundreds."""
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
    """Whether a value is a finite number."""
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
    """Whether a value is a number from 0 to 1."""
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
