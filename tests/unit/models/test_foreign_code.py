"""No code of a checkpoint runs, whichever of its files names it, and nobody is asked whether it may."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core import ConfigError
from penstock.models.checkpoint import open_checkpoint
from penstock.models.speculators.formats import open_speculator
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
"""What each file would have transformers import from the checkpoint's folder."""


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
    """Whoever asks is told to go on."""
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
    assert not (folder / "marker").exists()
    assert stdin.tell() == 0


@pytest.mark.parametrize("name", AUTO_MAP)
def test_no_file_has_code_imported(folder: Path, stdin: io.StringIO, name: str) -> None:
    change(folder / name, auto_map=AUTO_MAP[name])
    message = rf"{name}: auto_map asks to run the checkpoint's own code .*foreign\.Foreign.*take the field out"
    refused(lambda: open_checkpoint(str(folder)), folder, stdin, message)
    refused(lambda: load_tokenizer(folder), folder, stdin, message)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_nor_where_transformers_has_no_class_of_its_own(folder: Path, stdin: io.StringIO, name: str) -> None:
    change(folder / "config.json", model_type="foreign", tokenizer_class=None)
    change(folder / "tokenizer_config.json", tokenizer_class="Foreign")
    change(folder / name, auto_map=AUTO_MAP[name])
    refused(lambda: open_checkpoint(str(folder)), folder, stdin, f"{name}: auto_map asks")
    refused(lambda: load_tokenizer(folder), folder, stdin, f"{name}: auto_map asks")


def test_nor_in_a_table_within_the_table(folder: Path, stdin: io.StringIO) -> None:
    change(folder / "config.json", text_config={"auto_map": AUTO_MAP["config.json"]})
    refused(lambda: open_checkpoint(str(folder)), folder, stdin, r"config\.json: text_config\.auto_map asks")


def test_nor_code_of_another_repository(folder: Path, stdin: io.StringIO) -> None:
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["somebody/code--foreign.Foreign", None]})
    refused(lambda: load_tokenizer(folder), folder, stdin, "auto_map asks to run .*somebody/code--foreign")


def test_nor_beside_a_speculator(sound: Path, tmp_path: Path, stdin: io.StringIO) -> None:
    target = open_checkpoint(str(sound))
    folder = speculators.eagle(target).save(tmp_path / "eagle")
    write_code(folder)
    assert open_speculator(str(folder), target).kind == "eagle"
    change(folder / "config.json", auto_map=AUTO_MAP["config.json"])
    for path in (folder, folder / "model.safetensors"):
        refused(lambda path=path: open_speculator(str(path), target), folder, stdin, "auto_map asks to run")


def test_an_empty_map_asks_for_nothing(folder: Path) -> None:
    for name in AUTO_MAP:
        change(folder / name, auto_map={})
    open_checkpoint(str(folder))
    load_tokenizer(folder)


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
