"""How dtype and quantization are chosen on a host."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from penstock.config import FieldError
from penstock.engine.build import drafting_plan, stage_plans
from penstock.engine.options import DEMO, EngineOptions
from penstock.engine.resolve import resolve_options
from penstock.models import packing
from tests import drivers
from tests.drivers import install_driver
from tests.gguf_files import make_gguf


def resolved(model: Path | str, quantization: str) -> str:
    return resolve_options(EngineOptions(model=str(model), quantization=quantization)).quantization


@pytest.fixture
def multiplies_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "works", lambda: True)


@pytest.mark.usefixtures("multiplies_int8")
def test_auto_takes_whole_numbers_for_whole_numbers(tmp_path: Path) -> None:
    assert resolved("demo", "auto") == "none"
    assert resolved(make_gguf(tmp_path / "floats", kind=Kind.F16), "auto") == "none"
    assert resolved(make_gguf(tmp_path / "eight", kind=Kind.Q8_0), "auto") == "int8"
    whole = make_gguf(tmp_path / "four", kind=Kind.Q4_1)
    assert resolved(whole, "auto") == "int4"
    assert resolved(whole, "none") == "none"
    assert resolved("demo", "int8") == "int8"


def test_a_processor_without_such_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packing, "works", lambda: False)
    assert resolved(make_gguf(tmp_path, kind=Kind.Q4_1), "auto") == "none"
    with pytest.raises(FieldError, match="quantization is 'int8', for which this processor lacks instructions"):
        resolved("demo", "int8")


def test_a_gpu_holds_whole_numbers_whatever_this_processor_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(packing, "works", lambda: False)
    assert resolve_options(EngineOptions(device="cuda")).quantization == "none"
    assert resolve_options(EngineOptions(device="cuda", quantization="int8")).quantization == "int8"
    model = str(make_gguf(tmp_path / "four", kind=Kind.Q4_1))
    four = resolve_options(EngineOptions(device="cuda", model=model, dtype="auto"))
    assert (four.quantization, four.options.dtype) == ("int4", "bfloat16")
    assert resolve_options(EngineOptions(device="cuda", model=model, quantization="none")).quantization == "none"


def test_experts_are_floats_on_a_gpu() -> None:
    weights = SimpleNamespace(bits=4)
    dense, sparse = (
        SimpleNamespace(weights=weights, config=SimpleNamespace(**fields)) for fields in ({}, {"n_routed_experts": 4})
    )
    assert packing.weights_format("auto", "cuda", dense) == "int4"  # type: ignore[arg-type]
    assert packing.weights_format("auto", "cuda", sparse) == "none"  # type: ignore[arg-type]


@pytest.mark.usefixtures("multiplies_int8")
def test_draft_models_have_it_too() -> None:
    config = {"method": "draft_model", "model": str(DEMO / "draft")}
    setup = resolve_options(EngineOptions(quantization="int8", speculative_config=config))
    assert [plan.quantization for plan in stage_plans(setup)] == ["int8"]
    assert setup.draft_quantization == "int8"
    assert drafting_plan(setup, "draft", 1).quantization == "int8"


@pytest.mark.usefixtures("multiplies_int8")
def test_a_target_in_floats_drafts_with_itself_in_four_bits() -> None:
    config = {"method": "draft_model", "model": str(DEMO / "target"), "quantization": "int4"}
    setup = resolve_options(EngineOptions(speculative_config=config))
    assert [plan.quantization for plan in stage_plans(setup)] == ["none"]
    assert drafting_plan(setup, "draft", 1).quantization == "int4"


def of_drafter(quantization: str | None = None, **options: str) -> str:
    asked = {} if quantization is None else {"quantization": quantization}
    config = {"method": "eagle3", **asked}
    return resolve_options(EngineOptions(speculative_config=config, **options)).draft_quantization  # type: ignore[arg-type]


@pytest.mark.usefixtures("multiplies_int8")
def test_a_learned_drafter_computes_in_eight_bits_where_that_saves_time() -> None:
    assert of_drafter() == of_drafter(quantization="int8") == "int8"
    assert of_drafter("int4") == "int4"
    assert of_drafter("none") == "none"
    assert of_drafter(cluster="spd-4") == "none"
    assert resolve_options(EngineOptions(speculative_config={"method": "ngram"})).draft_quantization == "none"


def test_a_learned_drafter_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "works", lambda: False)
    assert of_drafter() == "none"
    with pytest.raises(FieldError, match=r"speculative_config.quantization is 'int8', for which this processor lacks"):
        of_drafter("int8")


@pytest.mark.usefixtures("multiplies_int8")
def test_a_learned_drafter_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert of_drafter(device="cuda") == "none"
    with pytest.raises(FieldError, match=r"speculative_config.quantization is 'int4', which learned drafters have on"):
        of_drafter("int4", device="cuda")


def test_bfloat16_gives_way_with_a_word(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions(dtype="bfloat16")
    monkeypatch.setattr(packing, "can_pack", lambda dtype: dtype == torch.bfloat16)
    assert resolve_options(options).options.dtype == "bfloat16"
    assert caplog.records == []
    monkeypatch.setattr(packing, "can_pack", lambda dtype: False)
    with caplog.at_level(logging.WARNING):
        assert resolve_options(options).options.dtype == "float32"
    assert "dtype is bfloat16, for which this processor has no instructions" in caplog.text


@pytest.mark.parametrize(
    ("stored", "good_at", "expected", "said"),
    [
        ("bfloat16", True, "bfloat16", ""),
        (
            "bfloat16",
            False,
            "float32",
            "the checkpoint's dtype is bfloat16, for which this processor has no instructions",
        ),
        ("float16", True, "float32", "the checkpoint's dtype is float16, for which this processor has no instructions"),
        ("float32", False, "float32", ""),
        (None, True, "float32", ""),
        ("float8_e4m3fn", True, "float32", ""),
    ],
)
def test_auto_is_the_checkpoints_own_where_the_device_is_good_at_it(
    stored: str | None,
    good_at: bool,
    expected: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    shutil.copytree(DEMO / "target", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": stored}))
    monkeypatch.setattr(packing, "can_pack", lambda dtype: good_at)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert resolve_options(EngineOptions(model=str(tmp_path / "model"), dtype="auto")).options.dtype == expected
    assert [record.message[: len(said)] for record in caplog.records] == [said] * bool(said)


@pytest.mark.parametrize(
    ("stored", "gpus", "expected"),
    [
        ("bfloat16", "", "bfloat16"),
        ("bfloat16", drivers.H100_MIG, "bfloat16"),
        ("bfloat16", drivers.ORIN, "bfloat16"),
        ("bfloat16", drivers.GEFORCE, "float16"),
        ("float16", drivers.H100_MIG, "float16"),
        ("float32", drivers.H100_MIG, "bfloat16"),
        (None, drivers.ODD, "bfloat16"),
    ],
)
def test_auto_has_16_bits_on_gpus_as_the_oldest_of_them_can(
    stored: str | None,
    gpus: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    install_driver(tmp_path, monkeypatch, gpus)
    shutil.copytree(DEMO / "target", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": stored}))
    asked = EngineOptions(model=str(tmp_path / "model"), device="cuda", dtype="auto")
    with caplog.at_level(logging.WARNING, "penstock"):
        assert resolve_options(asked).options.dtype == expected
    assert ("compute capability 7.5 has no instructions for bfloat16" in caplog.text) is (gpus == drivers.GEFORCE)


def test_only_the_gpus_that_are_used_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    found = [resolve_options(EngineOptions(device=f"cuda:{i}", dtype="auto")).options.dtype for i in range(3)]
    assert found == ["bfloat16", "bfloat16", "float16"]


def test_a_dtype_by_name_stays_and_a_gpu_that_lacks_it_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    for dtype in ("float32", "float16", "bfloat16"):
        assert resolve_options(EngineOptions(device="cuda", dtype=dtype)).options.dtype == dtype
    (said,) = caplog.messages
    assert said.endswith("has no instructions for bfloat16: dtype float16 is faster there")


@pytest.mark.usefixtures("multiplies_int8")
def test_hidden_states_are_float32_beside_whole_numbers(tmp_path: Path) -> None:
    model = str(make_gguf(tmp_path, kind=Kind.Q4_1))
    assert resolve_options(EngineOptions(model=model, dtype="auto")).options.dtype == "float32"
    asked = resolve_options(EngineOptions(model=model, dtype="float16"))
    assert (asked.quantization, asked.options.dtype) == ("int4", "float16")
