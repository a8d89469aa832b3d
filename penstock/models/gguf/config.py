"""A GGUF file's configuration, as transformers' config.json has it.

transformers translates the entries that it knows. What it leaves out and changes the numbers is added here: heads'
width, sliding windows, soft caps, and how rotary frequencies are scaled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from transformers import AutoConfig

from penstock.core import ConfigError
from penstock.files import problem_in, said, shown
from penstock.models.gguf.accepted import contradiction, number
from penstock.models.gguf.blocks import FLOATS, floats
from penstock.models.gguf.header import MAGIC, UINT32, VERSIONS, Header
from penstock.models.gguf.purpose import refusal
from penstock.scratch import scratch_folder

MOST_COUNTED: Final = 100_000
"""Of anything that the metadata counts: layers, heads."""
MOST_NUMBER: Final = 1 << 31
"""Widths, lengths of texts."""
TOKEN_ID: Final = "_token_id"
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
"""What phi3's frequencies are divided by, in short texts and in long ones."""
LLAMA_FACTORS: Final = "rope_freqs.weight"
"""What llama 3's frequencies are divided by, whatever the length."""
ROPE_TENSORS: Final = (*FACTORS, LLAMA_FACTORS)

SOFT_CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
WINDOWED: Final = ("gemma2", "gemma3", "phi3")
LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size (27B) that scales its scores by the width per head rather than the heads' width."""


def config_table(header: Header) -> dict[str, Any]:
    """The fields of config.json. Raises ConfigError for what contradicts itself or cannot be translated."""
    check_counted(header)
    table = translated(header)
    table.pop("_name_or_path", None)
    table["vocab_size"] = tensor_shape(header, EMBEDDING)[0]
    table["tie_word_embeddings"] = HEAD not in header.tensors
    add_heads(header, table)
    add_window(header, table)
    add_gemma(header, table)
    add_rope(header, table)
    return table


def check_counted(header: Header) -> None:
    """Raise ConfigError if an entry about the model counts more than any model has, or more layers than are there."""
    for key, entry in header.entries.items():
        if not key.startswith(f"{header.architecture}."):
            continue
        most = MOST_COUNTED if key.endswith("_count") else MOST_NUMBER
        if entry.count is not None:
            raise problem_in(header.path, key, "is a list; models whose layers differ cannot be read")
        if type(entry.value) is int and not 0 <= entry.value <= most:
            raise problem_in(header.path, key, f"is {entry.value}; there may be 0 to {most}")
    layers = number(header, "block_count")
    held = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if layers is None or not 0 < layers <= len(held):
        raise contradiction(header, "block_count", f"is {layers}; the file has {len(held)} layers")


def translated(header: Header) -> dict[str, Any]:
    """What transformers makes of the entries about the model, in a file of their own without vocabulary and tensors."""
    with scratch_folder() as folder:
        about = [key for key in header.entries if key.startswith(f"{header.architecture}.") or key.endswith(TOKEN_ID)]
        more = [] if f"{header.architecture}.vocab_size" in header.entries else [vocabulary_entry(header)]
        (folder / "header.gguf").write_bytes(entries_alone(header, about, more))
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf", trust_remote_code=False)
        except Exception as error:
            raise ConfigError(f"model: {header.path} describes no model: {said(error)}") from error
    found: dict[str, Any] = config.to_dict()
    return found


def vocabulary_entry(header: Header) -> bytes:
    """What transformers else looks for among the tokens, and warns that it has not found."""
    key = f"{header.architecture}.vocab_size".encode()
    size = min(tensor_shape(header, EMBEDDING)[0], MOST_NUMBER)
    return struct.pack("<Q", len(key)) + key + struct.pack("<II", UINT32, size)


def entries_alone(header: Header, keys: Iterable[str], more: Sequence[bytes] = ()) -> bytes:
    """A GGUF file of these entries and the architecture; ``more`` are entries of one's own."""
    raw = header.bytes()
    entries = [header.entries[key] for key in ("general.architecture", *keys)]
    kept = [*(raw[entry.start : entry.end] for entry in entries), *more]
    return MAGIC + struct.pack("<IQQ", VERSIONS[-1], 0, len(kept)) + b"".join(kept)


def add_heads(header: Header, table: dict[str, Any]) -> None:
    width, value_width = number(header, "attention.key_length"), number(header, "attention.value_length")
    if width is not None:
        table["head_dim"] = width
    if value_width not in (None, head_width(table)):
        raise contradiction(
            header, "attention.value_length", f"is {value_width}; it has to be the keys' {head_width(table)}"
        )


def head_width(table: dict[str, Any]) -> int:
    return int(table.get("head_dim") or table["hidden_size"] // max(1, table["num_attention_heads"]))


def add_window(header: Header, table: dict[str, Any]) -> None:
    window = number(header, "attention.sliding_window")
    if window and header.architecture not in WINDOWED:
        raise contradiction(header, "attention.sliding_window", f"is {window}; {header.architecture} has none")
    if window:
        table["sliding_window"] = window
    elif header.architecture in LARGEST_GEMMA:
        raise refusal(header, "without attention.sliding_window, which says how far its layers look back")


def add_gemma(header: Header, table: dict[str, Any]) -> None:
    """Soft caps, and what scores are divided by: as llama.cpp has them."""
    for name in SOFT_CAPS:
        if (cap := number(header, name, float)) is None:
            continue
        if name not in table:
            raise contradiction(header, name, f"is {cap}; {header.architecture} has none")
        table[name] = cap
    if header.architecture in LARGEST_GEMMA:
        largest = table["num_hidden_layers"] == LARGEST_GEMMA[header.architecture]
        per_head = table["hidden_size"] // max(1, table["num_attention_heads"])
        table["query_pre_attn_scalar"] = per_head if largest else head_width(table)


# --------------------------------------------------------------------------------------------------- rotary embeddings


def add_rope(header: Header, table: dict[str, Any]) -> None:
    rope = table.get("rope_parameters")
    if not isinstance(rope, dict):
        raise refusal(header, "without rotary embeddings, which its architecture has")
    scaled = rope.get("full_attention", rope)  # gemma3 scales those of the layers that see everything
    turned = number(header, "rope.dimension_count")
    if turned is not None and turned != head_width(table):
        if "partial_rotary_factor" not in rope:
            wanted = f"is {turned}; it has to be the {head_width(table)} numbers of a head"
            raise contradiction(header, "rope.dimension_count", wanted)
        table["partial_rotary_factor"] = rope["partial_rotary_factor"] = turned / head_width(table)
    scaled.update(scaling(header) | factors(header, table))


def scaling(header: Header) -> dict[str, Any]:
    """What the metadata say of how frequencies are scaled."""
    kind = header.value(f"{header.architecture}.rope.scaling.type", "none")
    factor = number(header, "rope.scaling.factor", float)
    original = number(header, "rope.scaling.original_context_length")
    if kind in ("none", "longrope") or factor is None:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise contradiction(header, "rope.scaling.type", f"is {shown(kind)}; linear and yarn can be read")


def factors(header: Header, table: dict[str, Any]) -> dict[str, Any]:
    """What single frequencies are divided by, where tensors of the file say so.

    transformers' longrope divides by a list, too. Llama 3's is the same for every length.
    """
    if LLAMA_FACTORS in header.tensors:
        same = numbers(header, LLAMA_FACTORS)
        longest = table["max_position_embeddings"]
        return longrope(same, same, longest) | {"attention_factor": 1.0}
    if all(name in header.tensors for name in FACTORS):
        short, long = (numbers(header, name) for name in FACTORS)
        original = number(header, "rope.scaling.original_context_length")
        if not original:
            raise refusal(header, "without rope.scaling.original_context_length, up to which its short factors hold")
        table["original_max_position_embeddings"] = original
        attention = number(header, "rope.scaling.attn_factor", float)
        return longrope(short, long, original) | ({} if attention is None else {"attention_factor": attention})
    return {}


def longrope(short: list[float], long: list[float], original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }


def numbers(header: Header, name: str) -> list[float]:
    info = header.tensors[name]
    if info.kind not in FLOATS or len(info.shape) != 1 or info.shape[0] > MOST_COUNTED:
        raise problem_in(header.path, name, f"is {info.kind.name} {list(info.shape)}; it has to be a list of floats")
    found: list[float] = floats(header.path, info).double().tolist()
    return found


def tensor_shape(header: Header, name: str) -> tuple[int, ...]:
    if name not in header.tensors:
        raise refusal(header, f"without {name}, so it is no whole model")
    return header.tensors[name].shape
