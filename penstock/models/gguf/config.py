"""The configuration in a GGUF file, as a table for transformers' config.json.

transformers translates the entries that it knows. Entries that it leaves out although they change the numbers are added
here: the heads' width, sliding windows, soft caps, and the scaling of rotary frequencies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from transformers import AutoConfig

from penstock.core import ConfigError
from penstock.files import problem_in, said
from penstock.models.gguf.accepted import contradiction, number
from penstock.models.gguf.arrays import numbers, value_of
from penstock.models.gguf.header import FLOAT32, MAGIC, UINT32, VERSIONS, Header
from penstock.models.gguf.rotary import add_rope
from penstock.models.gguf.sizes import EMBEDDING, HEAD, MOST_NUMBER, PATTERN, check_sizes, sizes_in, tensor_shape
from penstock.scratch import scratch_folder

TOKEN_ID: Final = "_token_id"
TOKEN_IDS: Final = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
"""Field of the configuration -> the role of the token in the file."""
TAKEN_OVER: Final = ("vocab_size", "rope.dimension_count")
"""Entries that transformers would read otherwise than llama.cpp: the embedding and ``rotary`` say what they say."""
ROUNDING: Final = 1e-6
"""The greatest difference between a number in the file (24 bits) and the same computed here."""
ATTENTION_CAP: Final = "attn_logit_softcapping"
SOFT_CAPS: Final = {
    ATTENTION_CAP: {"gemma2": 50.0},
    "final_logit_softcapping": {"gemma2": 30.0, "gemma3": 0.0},
}
"""Soft cap -> architecture -> llama.cpp's value where the file has none; 0 is no cap."""
SLIDING_LAYERS: Final = {"gemma2": 2, "gemma3": 6}
"""Architecture -> n, where every n-th layer sees everything if the file says nothing."""
DEFAULT_WINDOWS: Final = {"gemma2": 4096}
BIASES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "llama": {
        "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
    },
    **{name: {"attention_bias": ("attn_q", "attn_k", "attn_v")} for name in ("qwen3", "gemma2", "gemma3")},
}
"""Architecture -> field of the configuration -> parts whose layers have biases if it is set."""
WINDOWED: Final = ("gemma2", "gemma3", "phi3")
LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the one size (27B) that scales its scores by hidden size / heads instead of the heads' width."""


def config_table(header: Header) -> dict[str, Any]:
    """The fields of config.json. Raises ConfigError for entries that contradict each other or cannot be translated."""
    check_sizes(header)
    table = translated(header)
    table.pop("_name_or_path", None)
    table["vocab_size"] = tensor_shape(header, EMBEDDING)[0]
    table["tie_word_embeddings"] = HEAD not in header.tensors
    for name, role in TOKEN_IDS.items():  # the classes have defaults, which may lie beyond the file's vocabulary
        table[name] = header.value(f"tokenizer.ggml.{role}{TOKEN_ID}")
    add_heads(header, table)
    add_window(header, table)
    add_gemma(header, table)
    add_biases(header, table)
    add_rope(header, table, head_width(table))
    return table


def translated(header: Header) -> dict[str, Any]:
    """The entries about the model as transformers translates them, from a file without vocabulary and tensors."""
    with scratch_folder() as folder:
        own = {f"{header.architecture}.{name}" for name in TAKEN_OVER}
        about = [key for key in header.entries if key.startswith(f"{header.architecture}.") or key.endswith(TOKEN_ID)]
        arrays = [key for key in about if header.count(key)]
        about = [key for key in about if key not in own and key not in arrays]
        more = [vocabulary_entry(header)]
        more += [single_entry(key, value_of(header, key)) for key in arrays if value_of(header, key) is not None]
        (folder / "header.gguf").write_bytes(entries_alone(header, about, more))
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf", trust_remote_code=False)
        except Exception as error:
            raise ConfigError(f"model: {header.path} describes no model: {said(error)}; {sizes_in(header)}") from error
    found: dict[str, Any] = config.to_dict()
    return found


def vocabulary_entry(header: Header) -> bytes:
    """An entry with the vocabulary's size. Without it transformers looks for the tokens, and warns."""
    key = f"{header.architecture}.vocab_size".encode()
    size = min(tensor_shape(header, EMBEDDING)[0], MOST_NUMBER)
    return struct.pack("<Q", len(key)) + key + struct.pack("<II", UINT32, size)


def single_entry(key: str, value: Any) -> bytes:
    """An entry with the one value of an array whose values are all the same."""
    kind, packed = (UINT32, struct.pack("<I", value)) if type(value) is int else (FLOAT32, struct.pack("<f", value))
    return struct.pack("<Q", len(key.encode())) + key.encode() + struct.pack("<I", kind) + packed


def entries_alone(header: Header, keys: Iterable[str], more: Sequence[bytes] = ()) -> bytes:
    """A GGUF file of these entries and the architecture; ``more`` are further entries, packed already."""
    raw = header.bytes()
    entries = [header.entries[key] for key in ("general.architecture", *keys)]
    kept = [*(raw[entry.start : entry.end] for entry in entries), *more]
    return MAGIC + struct.pack("<IQQ", VERSIONS[-1], 0, len(kept)) + b"".join(kept)


def add_heads(header: Header, table: dict[str, Any]) -> None:
    """Add numbers and widths of heads, which llama.cpp derives from each other where the file leaves some out."""
    heads = table["num_attention_heads"]
    table["num_key_value_heads"] = number(header, "attention.head_count_kv") or heads
    width = number(header, "attention.key_length") or table["hidden_size"] // heads
    if table.get("head_dim") is not None or width != table["hidden_size"] // heads:
        table["head_dim"] = width
    values = number(header, "attention.value_length") or table["hidden_size"] // heads
    if values != width:
        raise contradiction(header, "attention.value_length", f"is {values}; it has to be the keys' {width}")
    for name in ("attention.key_length_swa", "attention.value_length_swa"):
        if number(header, name) not in (None, width):
            raise contradiction(header, name, f"is {number(header, name)}; it has to be the others' {width}")
    for name, wanted in (("rope.dimension_count_swa", width), ("embedding_length_out", table["hidden_size"])):
        if number(header, name) not in (None, wanted):
            raise contradiction(header, name, f"is {number(header, name)}; it has to be {wanted}")
    scale = number(header, "attention.scale", float)
    if scale and abs(scale - width**-0.5) > ROUNDING:
        raise contradiction(header, "attention.scale", f"is {scale}, which cannot be taken into account here")


def head_width(table: dict[str, Any]) -> int:
    return int(table.get("head_dim") or table["hidden_size"] // max(1, table["num_attention_heads"]))


def add_window(header: Header, table: dict[str, Any]) -> None:
    """Add the sliding window, and the layers that have it."""
    window = number(header, "attention.sliding_window")
    if window and header.architecture not in WINDOWED:
        raise contradiction(header, "attention.sliding_window", f"is {window}; {header.architecture} has none")
    if header.architecture not in SLIDING_LAYERS:
        if f"{header.architecture}.{PATTERN}" in header.entries:
            raise contradiction(header, PATTERN, f"is there; {header.architecture} has none")
        if window:
            table["sliding_window"] = window
        return
    usual = DEFAULT_WINDOWS.get(header.architecture, 0) if window is None else window
    slides = sliding_layers(header, table["num_hidden_layers"]) if usual else [False] * table["num_hidden_layers"]
    if usual and not any(slides):
        raise contradiction(header, PATTERN, "leaves no layer with a window, and attention.sliding_window is one")
    table["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if usual:
        table["sliding_window"] = usual


def sliding_layers(header: Header, layers: int) -> list[bool]:
    """Whether each layer has the sliding window: all but every n-th, or as a list in the file says."""
    key = f"{header.architecture}.{PATTERN}"
    if header.count(key):
        found = numbers(header, key)
        if found is None or len(found) < layers:
            raise problem_in(header.path, key, f"is a list of {header.count(key)}; the model has {layers} layers")
        return [bool(one) for one in found[:layers]]
    every = number(header, PATTERN)
    every = SLIDING_LAYERS[header.architecture] if every is None else every
    return [every == 0 or layer % every < every - 1 for layer in range(layers)]


def add_gemma(header: Header, table: dict[str, Any]) -> None:
    """Add llama.cpp's values of soft caps and of the scaling of scores."""
    for name, usual in SOFT_CAPS.items():
        stated = number(header, name, float)
        if header.architecture not in usual:
            if stated:
                raise contradiction(header, name, f"is {stated}; {header.architecture} has none")
            continue
        cap = usual[header.architecture] if stated is None else stated
        if cap < 0 or (cap == 0 and name == ATTENTION_CAP):
            raise contradiction(header, name, f"is {cap}; it has to be a number above 0")
        table[name] = cap or None
    if header.architecture in LARGEST_GEMMA:
        largest = table["num_hidden_layers"] == LARGEST_GEMMA[header.architecture]
        per_head = table["hidden_size"] // max(1, table["num_attention_heads"])
        table["query_pre_attn_scalar"] = per_head if largest else head_width(table)


def add_biases(header: Header, table: dict[str, Any]) -> None:
    """Set the fields for biases from the tensors that exist; biases that some layers lack are zeros."""
    for field, parts in BIASES.get(header.architecture, {}).items():
        table[field] = any(name.endswith(f"{part}.bias") for name in header.tensors for part in parts)
