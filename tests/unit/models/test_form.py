"""Stages built of what an earlier start has found: the same bits, and nothing that was kept is misread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from penstock.checkpoint import checkpoint as checkpoint_module
from penstock.checkpoint import gguf
from penstock.checkpoint.checkpoint import Checkpoint, is_known, open_checkpoint
from penstock.checkpoint.gguf import keep, question, recall, record_of
from penstock.checkpoint.gguf_header import read_header
from penstock.models import stage_model
from penstock.models.form import FormRecord, StageForm
from penstock.models.loader import check_loads
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.visibility import view_of
from tests.checkpoints import make_checkpoint
from tests.gguf_files import ARCHITECTURES, make_gguf

FAMILIES = ("llama", "llama_tied", "qwen2", "qwen3")
"""The architectures of ``ARCHITECTURES`` whose layers are fused."""
KINDS = {Kind.Q8_0: "int8", Kind.Q4_0: "int4", Kind.F16: "none"}
"""Formats of files, and of weights."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(*names: str) -> Path:
        found = tmp_path.joinpath("assets", *names, "default")
        found.mkdir(parents=True, exist_ok=True)
        return found

    monkeypatch.setattr(gguf, "cached_assets_path", place)


pytestmark = pytest.mark.usefixtures("cache")


def loaded(path: Path, first: int, last: int, **options: Any) -> StageModel:
    return load_stage(str(path), first, last, capacity=32, max_model_len=64, **options)


def computed(stage: StageModel) -> torch.Tensor:
    """The stage's states, and logits if it has a head, for four rows."""
    width = stage.entering_width
    given = None if stage.is_first else torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    states = stage.forward(view_of([3, 1, 4, 2], range(4)), given)
    return torch.cat([states.float(), stage.logits(states, range(4))], dim=1) if stage.is_last else states.float()


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("transformers was asked again")


def as_known(path: Path) -> Checkpoint:
    """The checkpoint, once it has been loaded."""
    check_loads(open_checkpoint(str(path)))
    return open_checkpoint(str(path))


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[pytest.mark.whole] if number % 2 else []) for number, one in enumerate(FAMILIES)],
)
def test_stages_are_the_same_to_the_last_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (kind, quantization) in enumerate(KINDS.items()):
        path = make_gguf(tmp_path / kind.name, family, kind=kind)
        layers = as_known(path).num_layers
        for first, last in ((0, layers), (0, 1), (1, layers)):
            options = {"quantization": quantization, "dtype": ("float32", "bfloat16")[number % 2]}
            found = loaded(path, first, last, **options)
            assert found.form is not None
            with monkeypatch.context() as without:
                without.setattr(stage_model, "read_module", refused)
                again = loaded(path, first, last, **options)
            assert again.form == found.form
            assert again.exact == found.exact
            assert again.weight_bytes == found.weight_bytes
            assert torch.equal(computed(again), computed(found))


def test_scaled_frequencies_are_the_same_for_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = np.linspace(1, 8, 4, dtype=np.float32)
    path = make_gguf(tmp_path, kind=Kind.Q8_0, tensors={"rope_freqs.weight": factors})
    as_known(path)
    found = loaded(path, 0, 2, quantization="int8")
    monkeypatch.setattr(stage_model, "read_module", refused)
    assert torch.equal(computed(loaded(path, 0, 2, quantization="int8")), computed(found))
    with pytest.raises(AssertionError, match="asked again"):
        load_stage(str(path), 0, 2, capacity=32, max_model_len=63, quantization="int8")


@pytest.mark.parametrize("family", sorted(set(ARCHITECTURES) - set(FAMILIES)))
def test_of_other_layers_nothing_is_kept(family: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path, family)
    assert as_known(path).known is None
    assert not is_known(str(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_file_is_opened_as_before(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path, family, kind=Kind.Q8_0)
    before = open_checkpoint(str(path))
    check_loads(before)
    with monkeypatch.context() as without:
        without.setattr(checkpoint_module, "_configuration", refused)
        again = open_checkpoint(str(path))
        assert is_known(str(path))
    assert again.known is not None
    stated = before.config.to_dict()
    for name in stated.keys() - {"id2label"}:  # labels of a classifier, by numbers
        assert getattr(again.config, name) == stated[name]
    for name in ("source", "path", "parts", "eos_token_ids", "sampling_defaults", "dtype", "vocab_size"):
        assert getattr(again, name) == getattr(before, name)
    assert again.weights.sizes() == before.weights.sizes()
    assert again.weights.files == before.weights.files
    assert again.transformers_config.to_dict() == stated


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_in_transformers_order(family: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path, family)
    header, config = read_header(path), open_checkpoint(str(path)).config
    theirs = gguf.order_of(header, config)
    parts = gguf.interleaved_parts(theirs, header, config)
    assert parts is not None
    assert bool(parts) == (header.architecture == "llama")
    for name, info in header.tensors.items():
        rows = np.random.default_rng(0).random(info.shape, np.float32)
        assert np.array_equal(gguf.in_order(parts, rows, name), theirs(rows, name))


def test_an_order_that_is_another_is_not_taken_for_it(tmp_path: Path) -> None:
    path = make_gguf(tmp_path)
    header, config = read_header(path), open_checkpoint(str(path)).config
    assert gguf.interleaved_parts(lambda rows, name: rows[::-1], header, config) is None
    assert gguf.interleaved_parts(lambda rows, name: rows + 1, header, config) is None


# --------------------------------------------------------------------------------------------------- what is not read


@pytest.fixture
def record(tmp_path: Path) -> tuple[Path, Path]:
    """A file that has been loaded, and the record of its layers."""
    path = make_gguf(tmp_path, kind=Kind.Q8_0)
    folder = as_known(path).path
    loaded(path, 0, 2, quantization="int8")
    return path, record_of(folder, "layers-0-2-float32")


def form_in(path: Path, first: int = 0, last: int = 2, dtype: str = "float32") -> StageForm | None:
    return FormRecord(open_checkpoint(str(path)), first, last, dtype, 64).read()


def test_a_damaged_record_is_none(record: tuple[Path, Path]) -> None:
    path, file = record
    whole = file.read_bytes()
    checkpoint = FormRecord(open_checkpoint(str(path)), 0, 2, "float32", 64)
    assert checkpoint.read() is not None
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    for content in (b"", b"\n", whole + b" ", *(whole[:at] for at in range(0, len(whole), 7)), *damaged):
        file.write_bytes(content)
        assert checkpoint.read() is None
    file.write_bytes(whole)
    assert checkpoint.read() is not None
    file.unlink()
    assert checkpoint.read() is None
    file.mkdir()
    assert checkpoint.read() is None


def test_a_damaged_record_is_made_anew(record: tuple[Path, Path]) -> None:
    path, file = record
    before = file.read_bytes()
    file.write_bytes(before[:-1])
    loaded(path, 0, 2, quantization="int8")
    assert file.read_bytes() == before
    model = file.with_name(gguf.MODEL)
    model.write_bytes(b"")
    assert not is_known(str(path))
    assert as_known(path).known is not None


@pytest.mark.parametrize("what", ["__version__", "version", "FACTS_LAYOUT"])
def test_a_record_of_another_version_is_none(
    what: str, record: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = record
    checkpoint = open_checkpoint(str(path))
    other: dict[str, Any] = {"__version__": "0.0.0", "version": lambda name: f"another {name}", "FACTS_LAYOUT": 0}
    monkeypatch.setattr(gguf, what, other[what])
    assert FormRecord(checkpoint, 0, 2, "float32", 64).read() is None
    assert checkpoint_module.known_of(read_header(path)) is None


def rewrite(path: Path) -> None:
    """Other weights behind the same header."""
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(64))
    os.utime(path, (1, 1))


def restate(path: Path) -> None:
    file = open_checkpoint(str(path)).path / "config.json"
    file.write_text(file.read_text().replace("1e-05", "1e-06").replace("1e-06", "1e-04") + " ")


@pytest.mark.parametrize("change", [rewrite, restate])
def test_a_record_of_another_file_is_none(change: Callable[[Path], None], record: tuple[Path, Path]) -> None:
    path, _ = record
    checkpoint = open_checkpoint(str(path))
    change(path)
    assert FormRecord(checkpoint, 0, 2, "float32", 64).read() is None
    assert not is_known(str(path))


def test_a_record_answers_its_own_question_alone(record: tuple[Path, Path]) -> None:
    path, file = record
    for first, last, dtype in ((0, 1, "float32"), (1, 2, "float32"), (0, 2, "bfloat16")):
        other = record_of(open_checkpoint(str(path)).path, f"layers-{first}-{last}-{dtype}")
        other.write_bytes(file.read_bytes())
        assert form_in(path, first, last, dtype) is None


def test_a_record_with_fields_of_another_is_none(record: tuple[Path, Path]) -> None:
    path, file = record
    checkpoint = open_checkpoint(str(path))
    asked = question(checkpoint.path, checkpoint.weights.files, "x")
    for content in ({}, [], {"layers": []}, {"layers": 1, "frequencies": [], "amplitude": 1.0, "epsilon": None}):
        keep(file, asked, content)
        assert recall(file, asked, StageForm) is None


def test_a_cache_that_cannot_be_written_to_keeps_nothing(tmp_path: Path) -> None:
    place = tmp_path / "file" / "record"
    (tmp_path / "file").write_text("")
    keep(place, "asked", {})
    assert recall(place, "asked", dict) is None


def test_a_checkpoint_may_be_named_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    monkeypatch.chdir(tmp_path)
    assert load_stage("model", 0, 1, capacity=8).is_first
