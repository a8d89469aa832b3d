"""No code of a checkpoint runs, whichever of its files names it, and nobody is asked whether it may."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core import ConfigError
from penstock.models.speculators.open import open_speculator
from penstock.models.stage_model import load_stage
from penstock.text.tokenizer import load_tokenizer
from tests import speculators
from tests.checkpoints import make_checkpoint

AUTO_MAP = {
    "config.json": {"AutoConfig": "foreign.Foreign", "AutoModelForCausalLM": "foreign.Foreign"},
    "tokenizer_config.json": {"AutoTokenizer": ["foreign.Foreign", "foreign.Foreign"]},
    "generation_config.json": {"AutoModelForCausalLM": "foreign.Foreign"},
    "processor_config.json": {"AutoProcessor": "foreign.Foreign"},
    "preprocessor_config.json": {"AutoProcessor": "foreign.Foreign"},
}
"""The code that each file would have transformers import from the checkpoint's folder."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sound"), tokenizer=True)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A checkpoint with a Python file beside it that leaves ``marker`` there when it is imported."""
    copy = shutil.copytree(sound, tmp_path / "hostile")
    write_code(copy)
    return copy


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard input that answers every question with yes."""
    told = io.StringIO("y\n" * 8)
    monkeypatch.setattr("sys.stdin", told)
    return told


def write_code(folder: Path) -> None:
    marker = folder / "marker"
    (folder / "foreign.py").write_text(
        f"open({str(marker)!r}, 'w').write('it ran')\n"
        "from transformers import LlamaConfig, PreTrainedTokenizerFast\n"
        "class Foreign(PreTrainedTokenizerFast):\n    model_type = 'foreign'\n"
    )


def change(file: Path, **fields: Any) -> None:
    table = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**table, **fields}))


def refused(act: Callable[[], object], folder: Path, stdin: io.StringIO, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        act()
    assert untouched(folder, stdin)


def untouched(folder: Path, stdin: io.StringIO) -> bool:
    """Nothing of the folder ran, and nobody was asked."""
    return not (folder / "marker").exists() and stdin.tell() == 0


def test_maps_are_passed_over_where_transformers_has_the_classes(sound: Path, folder: Path, stdin: io.StringIO) -> None:
    for name, asked in AUTO_MAP.items():
        change(folder / name, auto_map=asked)
    checkpoint, tokenizer = open_checkpoint(str(folder)), load_tokenizer(folder)
    load_stage(str(folder), 0, checkpoint.num_layers, capacity=8, max_model_len=8)
    assert type(checkpoint.config) is type(open_checkpoint(str(sound)).config)
    assert tokenizer.serialized() == load_tokenizer(sound).serialized()
    assert untouched(folder, stdin)


@pytest.mark.parametrize("model_type", ["foreign", None, 5, ["llama"]])
def test_a_model_that_transformers_lacks_is_refused(folder: Path, stdin: io.StringIO, model_type: object) -> None:
    change(folder / "config.json", model_type=model_type, auto_map=AUTO_MAP["config.json"])
    message = r"config\.json: auto_map asks to run the checkpoint's own code .*foreign\.Foreign.* no model of type "
    refused(lambda: open_checkpoint(str(folder)), folder, stdin, message + re.escape(json.dumps(model_type)))


def test_a_tokenizer_that_transformers_lacks_is_refused(folder: Path, stdin: io.StringIO) -> None:
    asked = AUTO_MAP["tokenizer_config.json"]
    change(folder / "tokenizer_config.json", auto_map=asked, tokenizer_class="ForeignTokenizer")
    message = r"tokenizer_config\.json: auto_map asks .*foreign\.Foreign.* no tokenizer called \"ForeignTokenizer\""
    refused(lambda: load_tokenizer(folder), folder, stdin, message)
    change(folder / "tokenizer_config.json", tokenizer_class=None)
    change(folder / "config.json", model_type="gpt_neox")
    load_tokenizer(folder)
    change(folder / "config.json", model_type="foreign")
    refused(lambda: load_tokenizer(folder), folder, stdin, "auto_map asks .* no tokenizer for a model of type")
    assert untouched(folder, stdin)


@pytest.mark.parametrize("named", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_tokenizer_of_transformers_is_taken_by_its_name(folder: Path, stdin: io.StringIO, named: str) -> None:
    change(folder / "config.json", model_type="foreign")
    change(folder / "tokenizer_config.json", auto_map=AUTO_MAP["tokenizer_config.json"], tokenizer_class=named)
    load_tokenizer(folder)
    assert untouched(folder, stdin)


def test_nor_does_a_map_in_a_table_within_the_table(folder: Path, stdin: io.StringIO) -> None:
    change(folder / "config.json", text_config={"auto_map": AUTO_MAP["config.json"]})
    open_checkpoint(str(folder))
    assert untouched(folder, stdin)


def test_nor_code_of_another_repository(folder: Path, stdin: io.StringIO) -> None:
    asked = {"AutoTokenizer": ["somebody/code--foreign.Foreign", None]}
    change(folder / "tokenizer_config.json", auto_map=asked, tokenizer_class="ForeignTokenizer")
    refused(lambda: load_tokenizer(folder), folder, stdin, "auto_map asks to run .*somebody/code--foreign")


def test_nor_beside_a_speculator(sound: Path, tmp_path: Path, stdin: io.StringIO) -> None:
    """Penstock reads it itself, whatever others would make of its map."""
    target = open_checkpoint(str(sound))
    folder = speculators.eagle(target).save(tmp_path / "eagle")
    write_code(folder)
    change(folder / "config.json", auto_map=AUTO_MAP["config.json"])
    for path in (folder, folder / "model.safetensors"):
        assert open_speculator(str(path), target).kind == "eagle"
    assert untouched(folder, stdin)


@pytest.mark.parametrize("asked", [[], "foreign.Foreign", 5, {"AutoConfig": None}, {"AutoTokenizer": 5}, [None, None]])
def test_any_map_is_passed_over_or_refused(folder: Path, stdin: io.StringIO, asked: object) -> None:
    for name in AUTO_MAP:
        change(folder / name, auto_map=asked)
    for act in (lambda: open_checkpoint(str(folder)), lambda: load_tokenizer(folder)):
        with contextlib.suppress(ConfigError):
            act()
    assert untouched(folder, stdin)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["somebody/kernel", {"": "somebody/kernel@main:attention"}])
def test_kernels_of_the_hub_are_code_too(folder: Path, field: str, value: object) -> None:
    change(folder / "config.json", **{field: value})
    with pytest.raises(ConfigError, match=rf"config\.json: {field} asks to load code from .*somebody/kernel"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["AutoTokenizer", "AutoModelForCausalLM", "LlamaForCausalLM", "pipeline", "Trainer"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_the_class_of_a_tokenizer_is_a_tokenizers(folder: Path, file: str, name: str) -> None:
    """transformers would look for any of its own names, and have that one load the folder."""
    change(folder / "tokenizer_config.json", tokenizer_class=None)
    change(folder / file, tokenizer_class=name)
    with pytest.raises(ConfigError, match=rf"{file}: tokenizer_class is \"{name}\""):
        load_tokenizer(folder)
