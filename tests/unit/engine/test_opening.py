"""Memory is told and checked before any stage of this host loads its layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from penstock.core import ConfigError
from penstock.engine.opening import check_here, open_executor, resolve_on, told
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import Resolved, resolve_options
from penstock.hosts import facts
from penstock.speculation import SpeculativeConfig
from tests import drivers
from tests.drivers import install_driver
from tests.gguf_files import make_gguf


def test_a_drafters_host_that_nobody_knows_is_refused_by_its_own_option() -> None:
    drafting = SpeculativeConfig(method="draft_model", model="demo")
    options = EngineOptions(hosts="localhost", drafter_on="nowhere.invalid", speculative_config=drafting, insecure=True)
    with pytest.raises(ConfigError, match=r"host nowhere\.invalid \(drafter_on\): "):
        open_executor(options)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three GPUs, the second almost full; the answer of the driver is in the returned file."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    return tmp_path / "answer"


def setup(device: str, **options: Any) -> Resolved:
    return resolve_options(EngineOptions(device=device, speculative_config=None, **options))


def test_a_gpu_of_this_host_without_room_is_refused_before_anything_loads(gpus: Path) -> None:
    large = {"kv_slots": 1 << 20}
    check_here(setup("cuda:0", **large))
    with pytest.raises(
        ConfigError, match=r"host localhost: cuda:1 has 1\.26 GB free, its stages need .* GB for weights"
    ):
        resolve_on(EngineOptions(device="cuda:1", speculative_config=None, **large), None)  # type: ignore[arg-type]
    gpus.write_text(drivers.GEFORCE.replace("1200", "[N/A]"))
    check_here(setup("cuda:1", **large))


def test_stages_that_share_a_gpu_are_added_up_and_others_are_not(gpus: Path) -> None:
    gpus.write_text(drivers.GEFORCE.replace("23900", "1200").replace("8000", "1200"))
    large = {"kv_slots": 250_000, "pipeline_parallel_size": 3}
    check_here(setup("cuda", **large))
    with pytest.raises(ConfigError, match="host localhost: cuda:1 has"):
        check_here(setup("cuda:1", **large))


def test_the_processors_memory_is_checked_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(facts, "MEMORY", file)
    with pytest.raises(ConfigError, match=r"host localhost: cpu has 0\.01 GB free"):
        check_here(setup("cpu"))
    file.unlink()
    monkeypatch.setattr(facts, "LIMITS", (file, file))
    check_here(setup("cpu"))


@pytest.mark.usefixtures("gpus")
def test_a_file_of_whole_numbers_on_a_gpu_is_told_to_be_held_as_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(make_gguf(tmp_path / "four", kind=Kind.Q4_1))
    with caplog.at_level(logging.WARNING, "penstock"):
        found = told(setup("cuda:0", model=model, quantization="none"))
        told(setup("cuda:0", model=model, dtype="auto", quantization="none"))
        told(setup("cuda:0"))
    full, half = (line for line in caplog.messages if "4 bits" in line)
    numbers = sum(found.checkpoint.weights.sizes().values())
    start = "the file's weights of 4 bits are held as"
    assert (
        full == f"{start} float32 on cuda:0, which takes {4e-9 * numbers:.2f} GB in all; dtype auto takes half of that"
    )
    assert half == f"{start} bfloat16 on cuda:0, which takes {2e-9 * numbers:.2f} GB in all"


@pytest.mark.usefixtures("gpus")
def test_whole_numbers_on_a_gpu_stay_whole_and_cost_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = str(make_gguf(tmp_path / "four", kind=Kind.Q4_1))
    with caplog.at_level(logging.WARNING, "penstock"):
        found = told(setup("cuda:0", model=model, dtype="auto"))
    assert found.quantization == "int4"
    numbers = sum(found.checkpoint.weights.sizes().values())
    assert caplog.messages == [
        "weights held as int4 become floats again at every step on cuda:0: quantization none is many times as fast "
        f"where its {2e-9 * numbers:.2f} GB fit"
    ]
