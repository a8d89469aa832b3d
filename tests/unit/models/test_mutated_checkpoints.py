"""A checkpoint with any of its JSON files changed either opens or is refused, and soon."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core import ConfigError, RequestError
from penstock.models.checkpoint import open_checkpoint
from penstock.models.shards import INDEX_FILE
from penstock.models.stage_model import load_stage
from penstock.text.grammar import load_grammar_tokenizer
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint

SOON = 20.0
"""Seconds. A sound one takes a fifth of one; whatever the files make loop or fill the memory takes far longer."""

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX_FILE)
NEW_FILES = ("special_tokens_map.json", "added_tokens.json", "processor_config.json")

HOSTILE = [
    *(None, True, False, 0, -1, 1, 2, 160, 1.5, -0.5, 10**6, 10**12, 2**31, 2**63, 10**30, float("nan"), float("inf")),
    *("", "x", "../x", "/etc/passwd", "org/code", "llama", "LlamaTokenizer", "\ud800", "x" * 1000, "</s>"),
    *([], [0], [1, "x"], [[]], [None], ["model.safetensors"], list(range(300))),
    *({}, {"a": 1}, {"": None}, {"type": "BPE"}, {"rope_type": "dynamic", "factor": 2.0}, {"0": {"content": "x"}}),
]
FIELDS = [
    *("auto_map", "attn_implementation", "base_model_pp_plan", "dtype", "eos_token_id", "experts_implementation"),
    *("head_dim", "id2label", "layer_types", "num_labels", "quantization_config", "rope_scaling", "sliding_window"),
    *("sub_configs", "text_config", "tokenizer_class", "transformers_weights", "use_cache", "vocab_size", "weight_map"),
    *("added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens", "init_inputs"),
    *("model_max_length", "normalizer", "padding", "tokenizer_file", "truncation", "temperature", "top_k"),
]
"""Fields that transformers or tokenizers do something with, wherever they stand."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sound"), tokenizer=True, max_shard_size="60KB")


def tables(value: Any) -> Iterator[dict[str, Any]]:
    """Every table in a JSON value, but for a tokenizer's hundreds of tokens, which are all alike."""
    if isinstance(value, dict) and len(value) < 100:
        yield value
        for inner in value.values():
            yield from tables(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from tables(inner)


def mutate(content: Any, data: st.DataObject) -> Any:
    """One change: a field replaced, removed, put under another name or added, or all of it replaced."""
    value = data.draw(st.sampled_from(HOSTILE), "value")
    kind = data.draw(st.sampled_from(["replace", "remove", "rename", "add", "whole"]), "kind")
    found = list(tables(content))
    if kind == "whole" or not found:
        return value
    table = data.draw(st.sampled_from(found), "table")
    known = data.draw(st.sampled_from(list(table) or FIELDS), "known")
    other = data.draw(st.sampled_from(FIELDS), "other")
    if kind in ("remove", "rename"):
        removed = table.pop(known, None)
        if kind == "rename":
            table[other] = removed
    else:
        table[known if kind == "replace" else other] = value
    return content


def open_all(folder: Path) -> None:
    """All that is done with a checkpoint before its first request, and a text through its tokenizer."""
    checkpoint = open_checkpoint(str(folder))
    checkpoint.even_split(2)
    tokenizer = load_tokenizer(folder)
    with contextlib.suppress(RequestError):
        tokenizer.decode(tokenizer.encode("a text"))
    load_grammar_tokenizer.__wrapped__(folder, checkpoint.vocab_size, checkpoint.eos_token_ids)
    load_stage(str(folder), 0, checkpoint.num_layers, capacity=8, max_model_len=8)


def test_it_opens_as_it_is(sound: Path) -> None:
    open_all(sound)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_is_refused_or_does_not_matter(sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "mutated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        file = folder / data.draw(st.sampled_from(FILES + NEW_FILES), "file")
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(mutate(content, data)))
    begin = time.monotonic()
    with contextlib.suppress(ConfigError):
        open_all(folder)
    assert time.monotonic() - begin < SOON
