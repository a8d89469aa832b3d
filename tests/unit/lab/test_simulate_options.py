"""Options that ``penstock simulate`` refuses before anything starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.config import FieldError
from penstock.lab.grid import parse_accuracy
from penstock.lab.simulate import SimulateOptions


def test_a_profile_is_read_or_refused() -> None:
    assert parse_accuracy("0.5, 0.75,1") == (0.5, 0.75, 1.0)
    with pytest.raises(FieldError, match="accuracy is 'high'; it has to be numbers with commas"):
        parse_accuracy("high")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clusters": ()}, "clusters is (); it has to be at least one name"),
        ({"clusters": ("demo", "demo")}, "clusters is 'demo,demo'; it has to be different ones"),
        ({"strategies": ()}, "strategies is (); it has to be at least one name"),
        ({"drafter_on": ("engine", "engine")}, "drafter_on is 'engine,engine'; it has to be different ones"),
        ({"accuracy": (0.9, 0.5)}, "accuracy is [0.9, 0.5]; it has to be a list of chances"),
        ({"accuracy": (0.5,), "recordings": (Path("a"),)}, "accuracy is set beside a recording"),
        ({"draft_model": "demo"}, "draft_model is what recordings have to be made with, but there are none"),
        ({"tokens_per_request": 1}, "tokens_per_request is 1; it has to be at least 2"),
        ({"tokens": 50}, "tokens is 50; it has to be at least tokens_per_request"),
        ({"tokens": 10**23}, f"tokens is {10**23}; it has to be at most 10,000,000"),
        ({"seed": -1}, "seed is -1; it has to be 0 or above"),
        ({"overhead_per_hop_ms": math.inf}, "overhead_per_hop_ms is inf; it has to be a finite number"),
        ({"overhead_per_hop_ms": -1.0}, "overhead_per_hop_ms is -1.0; it has to be 0 or above"),
        ({"json": Path("no/such/folder/a.json")}, "json is 'no/such/folder/a.json'"),
    ],
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(FieldError) as refused:
        SimulateOptions(**{"clusters": ("demo",), **given})
    assert str(refused.value).startswith(said)
