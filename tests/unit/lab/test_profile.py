"""``penstock profile``: of a cluster file it says what the prices come to, and it refuses what cannot be measured."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock.config import FieldError
from penstock.lab.plan_choices import PlanOptions
from penstock.lab.profile import HostsOptions, ProfileOptions
from tests.unit.cli.invoke import invoke


def test_an_emulated_clusters_profile_is_that_of_its_prices() -> None:
    """A Jetson NX of the preset: a layer of Llama-2-7B in 4 bits, 2 ms a batch, and rows beyond what that hides."""
    found = invoke("profile", "--cluster", "jupiter-heterogeneous", "--json")
    assert found.exit_code == 0
    table = json.loads(found.stdout)
    assert set(table["times"]) == {"nano-1", "tx2-1", "tx2-2", "nx-1"}
    nx = table["times"]["nx-1"]
    assert nx["stage_ms"] == pytest.approx([2.0] * 5, abs=1e-6)
    one, four, *_, many = (line[0] for line in nx["layer_ms"])
    assert one == pytest.approx(four, rel=0.01)
    assert many > 15 * one
    assert nx["layer_ms"][0][-1] > nx["layer_ms"][0][0]
    shown = invoke("profile", "--cluster", "jupiter-heterogeneous")
    assert "nx-1: from 14 rows on 90% of the best rows per second" in shown.stdout
    assert "KV of 4096 tokens" in shown.stdout


MEASURED: dict[str, Any] = {
    "hosts": "a",
    "keys": "folder",
    "insecure": True,
    "dtype": "bfloat16",
    "quantization": "int8",
    "device": "cuda",
    "threads": 0,
    "max_model_len": -1,
}
"""A value, other than the default, of each option that says how hosts are measured."""


@pytest.mark.parametrize("name", [one.name for one in fields(HostsOptions) if one.name != "model"])
def test_options_of_measuring_are_refused_where_nothing_is_measured(name: str, tmp_path: Path) -> None:
    given = {name: MEASURED[name]}
    with pytest.raises(FieldError, match=f"^{name} is .* left out with a cluster file: nothing is measured"):
        ProfileOptions(cluster="demo", **given)
    if name != "hosts":  # besides a cluster it is refused as a second place
        with pytest.raises(FieldError, match=f"^{name} is .* left out with a cluster: nothing is measured"):
            PlanOptions(cluster="demo", **given)
        with pytest.raises(FieldError, match=f"^{name} is .* left out with doctor's report: nothing is measured"):
            PlanOptions(doctor=tmp_path / "report.json", model="m", **given)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "model is missing: name the checkpoint to measure, or a cluster file"),
        (["--cluster", "demo", "--hosts", "a"], "hosts is 'a'; it has to be left out with a cluster file"),
        (["no-such-model", "--hosts", "join://a:1"], "hosts is 'join://a:1'; name them, since each is measured"),
        (["demo", "--device", "tpu"], "device is 'tpu'"),
        (["--cluster", "local-2"], "as_model is None; it has to be named"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], words: str) -> None:
    result = invoke("profile", *flags)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
