"""The scaling of a GGUF file's rotary embeddings, as transformers' ``rope_parameters``.

llama.cpp divides frequencies by a factor in the file (``linear``, also where no type is named), by YaRN's ramp, or by
the factors in a tensor. In all cases it multiplies cosines and sines by ``rope.scaling.attn_factor``.
"""

from __future__ import annotations

import math
from typing import Any, Final

from penstock.files import problem_in, shown
from penstock.models.gguf.accepted import contradiction, number
from penstock.models.gguf.blocks import FLOATS, floats
from penstock.models.gguf.header import Header
from penstock.models.gguf.purpose import refusal

FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors with phi3's divisors of the frequencies, for short texts and for long ones."""
LLAMA_FACTORS: Final = "rope_freqs.weight"
"""The tensor with llama 3's divisors of the frequencies, for every length."""
ROPE_TENSORS: Final = (*FACTORS, LLAMA_FACTORS)
MOST_FACTORS: Final = 100_000
DEFAULT_BASE: Final = 10000.0
"""llama.cpp's base where the file has none."""
TWO_BASES: Final = "gemma3"
"""The architecture whose sliding layers have a base of their own, which is never scaled."""
SCALED_APART: Final = ("gemma2",)
"""Architectures whose sliding layers are scaled by the factor, whatever the type."""
TYPES: Final = ("none", "linear", "yarn", "longrope")
KINDS_OF_FACTORS: Final = {"llama": ("longrope",), "phi3": TYPES}
"""Architecture -> types of scaling that may have factors for short and long texts."""


def add_rope(header: Header, table: dict[str, Any], head_width: int) -> None:
    rope = table.get("rope_parameters")
    if not isinstance(rope, dict):
        raise refusal(header, "without rotary embeddings, which its architecture has")
    turned = number(header, "rope.dimension_count")
    if turned is not None and turned != head_width:
        if "partial_rotary_factor" not in rope or turned > head_width:
            wanted = f"is {turned}; it has to be the {head_width} numbers of a head"
            raise contradiction(header, "rope.dimension_count", wanted)
        if turned < 2 or turned % 2:  # numbers rotate in pairs, and llama.cpp never rotates none
            raise contradiction(header, "rope.dimension_count", f"is {turned}; it has to be even and above 0")
        table["partial_rotary_factor"] = rope["partial_rotary_factor"] = turned / head_width
    scaled = rope.get("full_attention", rope)  # gemma3 scales only its full-attention layers
    scaled["rope_theta"] = base = above_0(header, "rope.freq_base", DEFAULT_BASE)
    add_sliding_base(header, rope, base)
    count = (turned or head_width) // 2
    scaled.update(lists(header, table, count) or one_factor(header, table, count))


def add_sliding_base(header: Header, rope: dict[str, Any], base: float) -> None:
    """Set the base of the sliding layers, which current converters always write."""
    is_apart = header.architecture == TWO_BASES
    sliding = above_0(header, "rope.freq_base_swa", DEFAULT_BASE if is_apart else base)
    if is_apart:
        rope["sliding_attention"]["rope_theta"] = sliding
    elif sliding != base:
        raise contradiction(header, "rope.freq_base_swa", f"is {sliding}; all its layers turn by {base}")


def one_factor(header: Header, table: dict[str, Any], count: int) -> dict[str, Any]:
    """The scaling that the metadata give for all frequencies together."""
    kind, factor, attention = kind_of(header), factor_of(header), attention_factor(header)
    if kind == "yarn":
        if factor < 1:
            raise contradiction(header, "rope.scaling.factor", f"is {factor}; of yarn it has to be 1 or more")
        original = number(header, "rope.scaling.original_context_length") or table["max_position_embeddings"]
        for name, usual in (("yarn_beta_fast", 32.0), ("yarn_beta_slow", 1.0)):
            if (stated := number(header, f"rope.scaling.{name}", float)) not in (None, usual):
                raise contradiction(header, f"rope.scaling.{name}", f"is {stated}; only {usual} can be read")
        spread = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": spread * attention,
        }
    if kind == "longrope":
        raise contradiction(header, "rope.scaling.type", f'is "longrope", and there are no {" and ".join(FACTORS)}')
    if attention != 1.0:
        same = [factor] * count
        return longrope(same, same, table["max_position_embeddings"], attention)
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def lists(header: Header, table: dict[str, Any], count: int) -> dict[str, Any]:
    """The scaling that tensors of the file give for single frequencies; empty where there are none.

    transformers' longrope divides by a list as well. Llama 3's list is the same for every length.
    """
    held = [name for name in ROPE_TENSORS if name in header.tensors]
    if not held:
        return {}
    kind, factor, attention = kind_of(header), factor_of(header), attention_factor(header)
    if kind == "yarn":
        raise contradiction(
            header, "rope.scaling.type", f'is "yarn", and there are {", ".join(held)}: only one of both'
        )
    if held == [LLAMA_FACTORS] and header.architecture == "llama" and kind != "longrope":
        same = [one * factor for one in numbers(header, LLAMA_FACTORS, count)]
        return longrope(same, same, table["max_position_embeddings"], attention)
    if held != list(FACTORS) or kind not in KINDS_OF_FACTORS.get(header.architecture, ()):
        raise refusal(header, f"with {', '.join(held)}, which {header.architecture} does not turn by here")
    original = number(header, "rope.scaling.original_context_length")
    if not original:
        raise refusal(header, "without rope.scaling.original_context_length, up to which its short factors hold")
    table["original_max_position_embeddings"] = original
    short, long = ([one * factor for one in numbers(header, name, count)] for name in FACTORS)
    return longrope(short, long, original, attention)


def longrope(short: list[float], long: list[float], original: int, attention: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def kind_of(header: Header) -> str:
    """The type of scaling; a factor without a type is linear."""
    kind = header.value(f"{header.architecture}.rope.scaling.type", "linear")
    if kind not in TYPES:
        raise contradiction(header, "rope.scaling.type", f"is {shown(kind)}; {', '.join(TYPES)} can be read")
    return str(kind)


def factor_of(header: Header) -> float:
    """The divisor of the frequencies; ``scale_linear`` is its older name."""
    names = [name for name in ("rope.scaling.factor", "rope.scale_linear") if number(header, name, float)]
    factor = above_0(header, names[0], 1.0) if names else 1.0
    if kind_of(header) != "none" or factor == 1.0:
        return factor
    if header.architecture in SCALED_APART:
        raise contradiction(header, names[0], f"is {factor}, and rope.scaling.type is none: take one of both out")
    return 1.0


def attention_factor(header: Header) -> float:
    stated = above_0(header, "rope.scaling.attn_factor", 1.0)
    if stated != 1.0 and header.architecture == TWO_BASES:
        raise contradiction(header, "rope.scaling.attn_factor", f"is {stated}; {header.architecture} has none")
    return stated


def above_0(header: Header, name: str, default: float) -> float:
    value = number(header, name, float)
    if value is not None and not 0 < value < math.inf:
        raise contradiction(header, name, f"is {value}; it has to be a number above 0")
    return default if value is None else float(value)


def numbers(header: Header, name: str, count: int) -> list[float]:
    info = header.tensors[name]
    if info.kind not in FLOATS or len(info.shape) != 1 or info.shape[0] > MOST_FACTORS:
        raise problem_in(header.path, name, f"is {info.kind.name} {list(info.shape)}; it has to be a list of floats")
    found: list[float] = floats(info).double().tolist()
    if len(found) != count or not all(0 < one < math.inf for one in found):
        raise problem_in(header.path, name, f"is {found[:8]}; it has to be {count} numbers above 0")
    return found
