"""Device memory that each stage needs at least, as far as that is known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

from penstock.dtypes import DTYPE_BYTES
from penstock.engine.resolve import Resolved

WHOLE_NUMBERS: Final = {"int8": 1.0, "int4": 0.5}
"""Bytes per weight of a quantised matrix, without its scales."""


def needed_bytes(setup: Resolved) -> list[int]:
    """Bytes of each stage: weights, KV cache, and per-slot states of layers that carry a state."""
    numbers = numbers_by_part(setup.checkpoint.weights.sizes())
    width = WHOLE_NUMBERS.get(setup.quantization, float(DTYPE_BYTES[setup.options.dtype]))
    kept = slot_bytes(setup)
    return [
        round(width * (sum(numbers.get(layer, 0) for layer in range(first, last)) + beside(numbers, i, setup.stages)))
        + sum(kept[first:last])
        for i, (first, last) in enumerate(setup.layers)
    ]


def slot_bytes(setup: Resolved) -> list[int]:
    """Bytes that each layer keeps in its slots: keys and values, state, or both."""
    config, dtype = setup.checkpoint.config, DTYPE_BYTES[setup.options.dtype]
    kv = 2 * kv_width(config) * dtype
    attends, carries = attention_slots(setup), carrying(config)
    whole = setup.quantization if setup.options.device == "cpu" else "none"
    carried = near_slots(setup) * state_bytes(config, dtype, whole) if any(carries) else 0
    return [kv * slots + carried * state for slots, state in zip_longest(attends, carries, fillvalue=False)]


def kept_for_sharing(setup: Resolved) -> int:
    """Bytes, over all stages, that prefix caching alone takes when all slots are taken."""
    alone = replace(setup, options=replace(setup.options, enable_prefix_caching=False))
    return sum(slot_bytes(setup)) - sum(slot_bytes(alone))


def attention_slots(setup: Resolved) -> list[int]:
    """Slots for which each layer holds keys and values; 0 for a layer without attention."""
    from penstock.models.windowed import windowed

    config, layers = setup.checkpoint.config, setup.checkpoint.num_layers
    near = windowed(config, layers)
    return [
        attends * (near_slots(setup) if near[layer] else setup.capacity)
        for layer, attends in enumerate(attending(config, layers))
    ]


def near_slots(setup: Resolved) -> int:
    """Slots that layers with a limited reach hold at least: without prefix caching, those that one text needs."""
    from penstock.models.windowed import reach_of

    reach = reach_of(setup.checkpoint.config)
    return setup.capacity if setup.options.enable_prefix_caching or reach is None else min(setup.capacity, reach)


def beside(numbers: Mapping[int | str, int], stage: int, stages: int) -> int:
    """Weights (a count) that a stage holds beside its layers: the embedding, or the head, which may be the same one."""
    embedding, rest = numbers.get("embedding", 0), numbers.get("rest", 0)
    if stage == stages - 1:
        return (rest or embedding) + (embedding if stages == 1 and rest else 0)
    return embedding if stage == 0 else 0


def numbers_by_part(sizes: Mapping[str, int]) -> dict[int | str, int]:
    """Weights (counts) of each layer, by index, of the "embedding", and of the "rest": norm and head."""
    from penstock.models.shards import layer_of

    numbers: dict[int | str, int] = {}
    for name, size in sizes.items():
        layer = layer_of(name)
        part = layer if layer is not None else outside_part(name)
        numbers[part] = numbers.get(part, 0) + size
    layers = [part for part in numbers if isinstance(part, int)]
    each = numbers.pop("for every layer", 0) // max(1, len(layers))
    return numbers | {layer: numbers[layer] + each for layer in layers}


def outside_part(name: str) -> str:
    from penstock.models.carried.layout import is_outside

    if is_outside(name):
        return "for every layer"
    return "embedding" if "embed" in name else "rest"


def attending(config: Any, layers: int) -> list[bool]:
    """Whether each layer keeps keys and values."""
    from penstock.models.carried.layout import carries, readers
    from penstock.models.gate import ATTENTION_TYPES, layer_types

    types = layer_types(config)
    others = readers(config) if carries(config) else range(0)
    return [index not in others and kind in ATTENTION_TYPES for index, kind in enumerate(types)] or [True] * layers


def kv_width(config: Any) -> int:
    """Elements of one row's keys in one layer, and as many of its values. A latent counts half for each."""
    if rank := getattr(config, "kv_lora_rank", None):
        return (int(rank) + int(config.qk_rope_head_dim)) // 2
    heads = int(config.num_attention_heads)
    kept = int(getattr(config, "num_key_value_heads", None) or heads)
    return kept * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def carrying(config: Any) -> list[bool]:
    """Whether each layer carries a state; empty where none does."""
    from penstock.models.gate import RECURRENT_TYPES, layer_types

    return [kind in RECURRENT_TYPES for kind in layer_types(config)]


def state_bytes(config: Any, dtype: int, quantization: str) -> int:
    """Bytes that a layer which carries a state keeps of one row; int4 weights on a CPU need the state in float64."""
    from penstock.models.recurrent.widths import kept

    return kept(config).bytes(dtype, 8 if quantization == "int4" else 4)
