"""Checks the counts and sizes in a GGUF file's metadata: they fit each other, and the shapes of the tensors.

llama.cpp divides by some of them, and a zero there ends its process. Here an error names the entry.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.files import problem_in
from penstock.models.gguf.accepted import contradiction, number
from penstock.models.gguf.arrays import value_of
from penstock.models.gguf.header import Header, TensorInfo
from penstock.models.gguf.purpose import refusal

MOST_COUNTED: Final = 100_000
"""The highest number of layers, heads and the like in the metadata."""
MOST_NUMBER: Final = 1 << 31
"""The highest width or context length."""
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
PATTERN: Final = "attention.sliding_window_pattern"
RMS_EPS: Final = "attention.layer_norm_rms_epsilon"
HIDDEN: Final = "embedding_length"
INNER: Final = "feed_forward_length"
HEADS: Final = "attention.head_count"
KV_HEADS: Final = "attention.head_count_kv"
KEYS: Final = "attention.key_length"
VALUES: Final = "attention.value_length"
NEEDED: Final = ("context_length", HIDDEN, INNER, HEADS)
"""Entries that every model has."""
ABOVE_0: Final = (*NEEDED, KV_HEADS, KEYS, VALUES)
"""Entries that are above 0 where the file has them."""
OF_LAYER: Final = re.compile(r"blk\.[0-9]+\.(\w+)\.(weight|bias)")
DOUBLE_UP: Final = "phi3"
"""The architecture whose ``ffn_up`` holds the rows of ``ffn_gate``, too."""

Side = tuple[int, tuple[str, ...]]
"""The size of a tensor's dimension, and the entries that it comes from."""


def check_sizes(header: Header) -> None:
    """Raise ConfigError for counts and sizes of no model, or of another one than the file's tensors make up."""
    check_counted(header)
    heads, kv_heads = (number(header, name) or number(header, HEADS) for name in (HEADS, KV_HEADS))
    if heads % kv_heads:
        raise contradiction(
            header, HEADS, f"is {heads}; it has to be a multiple of {header.architecture}.{KV_HEADS}, {kv_heads}"
        )
    sides = sides_of_tensors(header)
    for name in (EMBEDDING, *sorted(header.tensors.keys() - {EMBEDDING})):
        if name in header.tensors:
            check_shape(header, header.tensors[name], sides)


def check_counted(header: Header) -> None:
    """Raise ConfigError if an entry about the model counts more than any model has, or more layers than exist."""
    for key in header.entries:
        if not key.startswith(f"{header.architecture}."):
            continue
        most = MOST_COUNTED if key.endswith(("_count", "_count_kv")) else MOST_NUMBER
        value = value_of(header, key)
        if value is None and not key.endswith(PATTERN):
            raise problem_in(header.path, key, "is a list; models whose layers differ cannot be read")
        if type(value) is int and not 0 <= value <= most:
            raise problem_in(header.path, key, f"is {value}; there may be 0 to {most}")
    layers = number(header, "block_count")
    held = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if not layers or layers != len(held):
        raise contradiction(header, "block_count", f"is {layers}; the file has {len(held)} layers")
    for name in NEEDED:
        if number(header, name) is None:
            raise contradiction(header, name, "is missing; every model states it")
    for name in ABOVE_0:
        if number(header, name) == 0:
            raise contradiction(header, name, "is 0; it has to be above 0")
    if not 0 < (number(header, RMS_EPS, float) or 0) < 1:
        raise contradiction(header, RMS_EPS, f"is {number(header, RMS_EPS, float)}; it has to be a number above 0")


def sides_of_tensors(header: Header) -> dict[str, tuple[Side, ...]]:
    """Part of a layer -> the sizes of its weight [out, in], or of its vector. A bias has the first of them."""
    heads = number(header, HEADS)
    kv_heads = number(header, KV_HEADS) or heads
    is_stated = number(header, KEYS) is not None
    width = number(header, KEYS) if is_stated else number(header, HIDDEN) // heads
    of_width = (KEYS,) if is_stated else (HIDDEN, HEADS)
    hidden: Side = (number(header, HIDDEN), (HIDDEN,))
    inner: Side = (number(header, INNER), (INNER,))
    ups = 2 if header.architecture == DOUBLE_UP else 1
    queries: Side = (heads * width, (HEADS, *of_width))
    keys: Side = (kv_heads * width, (KV_HEADS, HEADS, *of_width))
    joint: Side = (queries[0] + 2 * keys[0], keys[1])
    vectors = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    return {
        "attn_q": (queries, hidden),
        **dict.fromkeys(("attn_k", "attn_v"), (keys, hidden)),
        "attn_qkv": (joint, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": ((ups * inner[0], inner[1]), hidden),
        "ffn_down": (hidden, inner),
        **dict.fromkeys(vectors, (hidden,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), ((width, of_width),)),
    }


def check_shape(header: Header, info: TensorInfo, sides: dict[str, tuple[Side, ...]]) -> None:
    """Raise ConfigError, with the entries and the tensor, if a tensor has other sizes than the entries give it."""
    part = OF_LAYER.fullmatch(info.name)
    if info.name in (EMBEDDING, HEAD):
        wanted: tuple[Side, ...] = ((tensor_shape(header, EMBEDDING)[0], ()), sides["attn_q"][1])
    elif part is not None and part[1] in sides:
        wanted = sides[part[1]][:1] if part[2] == "bias" else sides[part[1]]
    else:
        return
    if len(info.shape) != len(wanted):
        raise problem_in(header.path, info.name, f"is {list(info.shape)}; it has to have {len(wanted)} dimensions")
    for place, (size, names) in enumerate(wanted):
        if info.shape[place] != size:
            stated = {name: number(header, name) for name in names}
            others = [f"{header.architecture}.{name} {one}" for name, one in stated.items() if one is not None]
            shape = [one for one, _ in wanted]
            said = ", ".join(others) or f"{EMBEDDING} {list(tensor_shape(header, EMBEDDING))}"
            raise problem_in(header.path, info.name, f"is {list(info.shape)}; by {said} it would be {shape}")


def tensor_shape(header: Header, name: str) -> tuple[int, ...]:
    """The shape of a tensor that no model lacks. Raises ConfigError if the file has none of this name."""
    if name not in header.tensors:
        raise refusal(header, f"without {name}, so it is no whole model")
    return header.tensors[name].shape


def sizes_in(header: Header) -> str:
    """The whole numbers about the model, for an error message."""
    about = (key for key in header.entries if key.startswith(f"{header.architecture}."))
    return ", ".join(f"{key} {header.value(key)}" for key in about if type(header.value(key)) is int)
