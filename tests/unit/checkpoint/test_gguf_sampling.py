"""Recommended sampling parameters of GGUF files: taken, or named once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf_vocabulary import FIELDS, SAMPLING_PREFIX
from penstock.core import ConfigError
from tests.gguf_files import make_gguf

pytestmark = pytest.mark.usefixtures("cache")

VALUES: dict[str, Any] = {
    "sequence": "top_k;temperature",
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "temp": 0.6,
    "penalty_last_n": 64,
    "penalty_repeat": 1.05,
    "mirostat": 2,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
}
"""Entry -> a value that changes what is sampled, where the entry that it depends on has its value here, too."""


def recommending(tmp_path: Path, values: dict[str, Any]) -> Path:
    return make_gguf(tmp_path, entries={f"{SAMPLING_PREFIX}{name}": value for name, value in values.items()})


def test_these_are_all_entries_of_the_format() -> None:
    keys = {value for name, value in vars(gguf.Keys.General).items() if name.startswith("SAMPLING_")}
    assert {f"{SAMPLING_PREFIX}{name}" for name in VALUES} == keys


def test_each_is_taken_or_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = recommending(tmp_path, VALUES)
    found = open_checkpoint(str(path)).sampling_defaults
    assert found == {field: VALUES[name] for name, field in FIELDS.items()}
    (record,) = caplog.records
    assert str(path) in record.message
    for name in VALUES:
        assert (f"{SAMPLING_PREFIX}{name} " in record.message) is (name not in FIELDS)
    open_checkpoint(str(path))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"mirostat_tau": 5.0},
        {"xtc_probability": 0.0, "xtc_threshold": 0.1},
        {"penalty_last_n": 64},
        {"penalty_last_n": 64, "penalty_repeat": 1.0},
        {"penalty_last_n": 0, "penalty_repeat": 1.5},
    ],
    ids=str,
)
def test_what_says_nothing_is_not_named(
    tmp_path: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    found = open_checkpoint(str(recommending(tmp_path, values))).sampling_defaults
    assert found.get("repetition_penalty", 1.0) == 1.0
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 7.0), ("temp", -1.0), ("top_k", 0.5), ("min_p", "x"), ("penalty_repeat", 0.0)]
)
def test_what_no_parameter_may_be_is_refused_by_the_files_own_entry(
    tmp_path: Path, cache: Path, name: str, value: Any
) -> None:
    path = recommending(tmp_path, {name: value})
    with pytest.raises(
        ConfigError, match=rf"{path}: general\.sampling\.{name} recommends what cannot be: {FIELDS[name]} "
    ):
        open_checkpoint(str(path))
    assert list(cache.iterdir()) == []
