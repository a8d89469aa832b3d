"""Recordings that were made with other models than those named are refused, by file and with both values."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.core import ConfigError
from penstock.lab.acceptance import run_acceptance
from penstock.lab.record import Recording, fingerprint_of, load_recordings
from penstock.lab.simulate import SimulateOptions, run_simulate
from tests.recordings import make_recording


@pytest.fixture
def of_others(tmp_path: Path) -> Path:
    make_recording((20, 30)).save(tmp_path / "others.safetensors")
    return tmp_path / "others.safetensors"


@pytest.fixture
def of_demo(tmp_path: Path) -> Path:
    """A recording that names the shipped pair as its models."""
    recording = make_recording((20, 30))
    target, draft = fingerprint_of("demo", "target"), fingerprint_of("demo", "draft")
    assert target is not None
    assert draft is not None
    file = tmp_path / "demo.safetensors"
    replace(recording, header=replace(recording.header, target=target, draft=draft)).save(file)
    return file


def test_what_was_made_with_the_named_models_is_read(of_demo: Path, of_others: Path) -> None:
    for names in (("demo", "demo"), ("demo", None), (None, "demo"), (None, None)):
        assert isinstance(load_recordings([of_demo], *names)[0], Recording)
    assert len(load_recordings([of_demo, of_others], None, None)) == 2


def test_what_was_made_with_others_is_refused_with_both_values(of_demo: Path, of_others: Path) -> None:
    ours = fingerprint_of("demo", "target")
    assert ours is not None
    with pytest.raises(
        ConfigError, match=rf"others\.safetensors: target\.config is c0c0.*'demo' here is {ours.config[:12]}"
    ):
        load_recordings([of_demo, of_others], "demo", None)
    with pytest.raises(ConfigError, match=r"others\.safetensors: draft\.config is d0d0"):
        load_recordings([of_demo, of_others], None, "demo")
    with pytest.raises(ConfigError, match="there is no folder"):
        load_recordings([of_demo], str(of_demo.parent / "nowhere"), None)


def test_both_commands_refuse_them(of_others: Path) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigError, match=r"others\.safetensors: target\.config"):
        run_acceptance([of_others], as_json=False, console=console, model="demo")
    options = {"clusters": ("spd-4",), "strategies": ("pipedec",)}
    with pytest.raises(ConfigError, match=r"others\.safetensors: draft\.config"):
        run_simulate(SimulateOptions(**options, recordings=(of_others,), draft_model="demo"), console)  # type: ignore[arg-type]
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="model is what recordings have to be made with, but there are none"):
        SimulateOptions(**options, model="demo")  # type: ignore[arg-type]
