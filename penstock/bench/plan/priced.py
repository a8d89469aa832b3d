"""A checkpoint's price list, computed from the shape in its configuration: dense models of llama's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.cluster.prices import ModelPrice, llama
from penstock.core import ConfigError
from penstock.models.gguf.header import Header, read_header
from penstock.models.glance import stated_config
from penstock.models.places import resolve

BITS: Final = 32
"""Bits per weight. The doctor measures rates in float32, and they decide on the split whatever the format."""
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def price_of(model: str) -> ModelPrice:
    """The price list of a folder, a GGUF file or a hub id. Raises ConfigError where the configuration lacks a size."""
    place = resolve(model)
    if place.is_file():
        return price_of_header(model, read_header(place))
    table = stated_config(place)
    if any(table.get(name) for name in EXPERTS):
        raise unpriced(model, "it is a mixture of experts")
    read = reader(model, table.get)
    heads = read("num_attention_heads")
    key_value = table.get("num_key_value_heads") or heads
    width = table.get("head_dim") or read("hidden_size") // heads
    return llama(
        layers=read("num_hidden_layers"),
        hidden=read("hidden_size"),
        intermediate=read("intermediate_size"),
        key_value=int(key_value) * int(width),
        vocabulary=read("vocab_size"),
        bits=BITS,
        tied=bool(table.get("tie_word_embeddings")),
    )


def price_of_header(model: str, header: Header) -> ModelPrice:
    values: Mapping[str, Any] = {
        name: header.value(f"{header.architecture}.{name}")
        for name in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    }
    read = reader(model, values.get)
    heads, hidden = read("attention.head_count"), read("embedding_length")
    key_value = header.value(f"{header.architecture}.attention.head_count_kv") or heads
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or type(key_value) is not int or header.value(f"{header.architecture}.expert_count"):
        raise unpriced(model, "it is a mixture of experts, or its layers differ")
    return llama(
        layers=read("block_count"),
        hidden=hidden,
        intermediate=read("feed_forward_length"),
        key_value=key_value * int(header.value(f"{header.architecture}.attention.key_length") or hidden // heads),
        vocabulary=embedding.shape[0],
        bits=BITS,
        tied="output.weight" not in header.tensors,
    )


def reader(model: str, get: Callable[[str], Any]) -> Callable[[str], int]:
    def read(name: str) -> int:
        if type(value := get(name)) is not int or value < 1:
            raise unpriced(model, f"its configuration says no {name}")
        return value

    return read


def unpriced(model: str, why: str) -> ConfigError:
    return ConfigError(
        f"model {model}: cannot be priced: {why}; plan a cluster file with an as_model table of its sizes instead"
    )
