"""Facts about a checkpoint that show at a glance; the refusals are in tests/unit/cli/test_wrong_inputs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import Glance, glance, stated_config
from tests.checkpoints import LAYERS, VOCAB, make_checkpoint, make_tokenizer
from tests.gguf_files import make_gguf


def test_a_folder_and_a_file_say_the_same_as_when_they_are_opened(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama")
    assert glance(str(folder)) == Glance(LAYERS, VOCAB, 512, has_tokenizer=False)
    make_tokenizer(folder)
    assert glance(str(folder)).has_tokenizer
    file = make_gguf(tmp_path)
    seen, opened = glance(str(file)), open_checkpoint(str(file))
    assert (seen.num_layers, seen.vocab_size) == (opened.num_layers, opened.vocab_size)
    assert seen.max_position_embeddings == opened.config.max_position_embeddings


@pytest.mark.parametrize(
    "table",
    [
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "llama"},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM", "LlamaForSequenceClassification"]},
        {"model_type": ["llama"], "architectures": [1]},
    ],
)
def test_what_may_write_text_is_for_others_to_judge(tmp_path: Path, table: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert stated_config(tmp_path) == table


def test_what_is_not_plain_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": "30", "vocab_size": True}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert glance(str(tmp_path)) == Glance(None, None, None, has_tokenizer=False)
