"""Small GGUF files of random checkpoints, written as llama.cpp's own converter writes them: ``make_gguf(folder)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from penstock.checkpoint.gguf_header import read_header
from tests.checkpoints import make_checkpoint
from tests.llama_cpp import quantized

ARCHITECTURES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {"model_type": "llama"}),
    "llama_tied": ("llama", {"model_type": "llama", "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"model_type": "qwen2"}),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
        | {
            "layer_types": None,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3",
        {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
        | {"layer_types": None, "num_hidden_layers": 7, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", {"model_type": "phi3", "sliding_window": 6}),
    "phi3_partial": ("phi3", {"model_type": "phi3", "partial_rotary_factor": 0.5}),
}
"""The file's architecture, and the checkpoint's configuration."""

THETA: Final = 5000.0
"""A value that is no configuration's default, so that it has to come from the file."""
TOKENS: Final = ("<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th")
COMMON: Final = {"vocab_size": len(TOKENS), "intermediate_size": 64, "rope_theta": THETA}
"""Fields of every checkpoint's configuration."""
TEMPLATE: Final = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
CONTROL, NORMAL = 3, 1

SCALES: Final = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
"""Byte offsets of each format's float16 numbers in a block; every other byte may have any value."""


def make_gguf(
    folder: Path,
    architecture: str = "llama",
    *,
    kind: Kind = Kind.F32,
    seed: int = 0,
    entries: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint into ``folder / "checkpoint"`` and a GGUF file of it, whose path is returned.

    Matrices are stored as ``kind``. ``entries`` and ``tensors`` are added to the file, ``overrides`` go into the
    checkpoint's configuration.
    """
    name, settings = ARCHITECTURES[architecture]
    source = make_checkpoint(folder / "checkpoint", name, seed=seed, **{**COMMON, **settings, **overrides})
    path = folder / f"{architecture}.{kind.name}.gguf"
    write(path, source, name, kind, entries or {}, tensors or {})
    return path


def write(
    path: Path,
    source: Path,
    architecture: str,
    kind: Kind,
    entries: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer, model.config, architecture)
    describe_tokens(writer)
    for key, value in entries.items():
        writer.add_string(key, value) if isinstance(value, str) else add_number(writer, key, value)
    for name, data in {**tensors_of(model, architecture), **tensors}.items():
        stored = kind if data.ndim == 2 else Kind.F32
        writer.add_tensor(name, stored_as(data, stored), raw_dtype=stored)
    finish(writer)


class Whole(NamedTuple):
    """A whole number, and how a file stores it."""

    kind: gguf.GGUFValueType
    number: int


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the header, entries and tensors that a writer was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_entry(writer: gguf.GGUFWriter, name: str, field: gguf.ReaderField) -> None:
    """Give the writer an entry of another file, in the same format."""
    value, kind, inner = contents_of_entry(field)
    writer.add_key_value(name, value, kind, inner)


class Contents(NamedTuple):
    """All that a file holds: entries as (value, kind, kind of an array's values), and tensors."""

    architecture: str
    entries: dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]
    tensors: dict[str, np.ndarray]


@lru_cache(maxsize=8)
def contents_of(file: Path, changed_at: int) -> Contents:
    """Read once for all the copies that a test makes of a file, as it was changed last at ``changed_at``."""
    reader = gguf.GGUFReader(file)
    entries = {
        name: contents_of_entry(field)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    return Contents(read_header(file).architecture, entries, {one.name: one.data for one in reader.tensors})


def contents_of_entry(field: gguf.ReaderField) -> tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """The value of an entry, its kind and, of an array, that of its values."""
    kind = field.types[0]
    return field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None


def with_entries(
    source: Path, path: Path, changed: dict[str, Any], tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """A copy of a file with these entries, under their whole names (None takes one out), and these tensors."""
    held = contents_of(source, source.stat().st_mtime_ns)
    writer = gguf.GGUFWriter(path, held.architecture)
    for name, (value, kind, inner) in held.entries.items():
        if name not in changed:
            writer.add_key_value(name, value, kind, inner)
    for key, value in changed.items():
        add(writer, key, value)
    for name, data in held.tensors.items():
        if name not in (tensors or {}):
            writer.add_tensor(name, data)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    finish(writer)
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    if isinstance(value, Whole):
        writer.add_key_value(key, value.number, value.kind)
    elif value is not None:
        adder: Callable[[str, Any], None] = adders.get(type(value), writer.add_array)
        adder(key, value)


def split_gguf(path: Path, folder: Path, count: int) -> list[Path]:
    """The model of a file over several, as llama-gguf-split writes them."""
    reader = gguf.GGUFReader(path)
    files = [folder / f"model-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "llama")
        if number == 0:
            for name, field in reader.fields.items():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    copy_entry(writer, name, field)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return files


def stored_as(data: np.ndarray, kind: Kind) -> np.ndarray:
    """The weights in this format; where the ``gguf`` package cannot write it, random ones or llama.cpp's own."""
    try:
        return gguf.quants.quantize(data, kind)
    except NotImplementedError:
        return random_blocks(data.shape, kind, seed=data.size) if kind in SCALES else quantized(data, kind)


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    """The bytes of a random matrix [rows, bytes of a row]."""
    random = np.random.default_rng(seed)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (shape[0] * shape[1] // per_block, size), dtype=np.uint8)
    for place in SCALES[kind]:
        numbers = random.normal(0, 0.1, len(data)).astype(np.float16)
        data[:, place : place + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return data.reshape(shape[0], -1)


def add_number(writer: gguf.GGUFWriter, key: str, value: float) -> None:
    writer.add_uint32(key, value) if isinstance(value, int) else writer.add_float32(key, value)


def describe(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type("model")
    writer.add_name("a random one")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(THETA)
    if architecture in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(head)
        writer.add_value_length(head)
    if architecture in ("llama", "phi3"):
        writer.add_rope_dimension_count(int(head * config.rope_parameters.get("partial_rotary_factor", 1)))
    if architecture in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def describe_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The model's weights under GGUF's names, arranged as llama.cpp wants them."""
    config = model.config
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = interleaved(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            data = data + 1
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert named is not None
        found[named] = data
    return found


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbours (2 i, 2 i + 1) of a head, transformers its halves (i, i + d / 2)."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
