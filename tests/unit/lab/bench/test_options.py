"""Options that ``penstock bench`` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.lab.bench.options import BenchOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategies": ()}, "strategies"),
        ({"strategies": ("pipedec", "pipedec")}, "strategies"),
        ({"strategies": ("pipedec",), "num_prompts": 0}, "num_prompts"),
        ({"strategies": ("pipedec",), "max_tokens": 1}, "max_tokens"),
        ({"strategies": ("pipedec",), "seeds": 0}, "seeds"),
        ({"strategies": ("pipedec",), "temperature": (0.0, 0.0)}, "temperature"),
        ({"strategies": ("pipedec",), "prompts": ()}, "prompts"),
        ({"strategies": ("pipedec",), "json": Path("no/such/folder/out.json")}, "json"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BenchOptions(**options)  # type: ignore[arg-type]
