"""Options that ``penstock bench`` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.lab.bench.command import plan_of
from penstock.lab.grid import BenchOptions


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
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"data_parallel_size": 2, "cluster": "demo"}, "cluster is .*; it has to be left out with data_parallel_size"),
        ({"data_parallel_size": 2, "drafter_on": ("engine",)}, "drafter_on is"),
        ({"data_parallel_size": 2, "peer": ("hf",)}, "peer is"),
        ({"data_parallel_size": 2, "report": Path("report")}, "report is"),
        ({"data_parallel_size": 2, "record": Path("a.safetensors")}, "record is"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BenchOptions(**options)  # type: ignore[arg-type]


def test_a_drafter_that_has_to_know_the_answers_is_for_one_engine() -> None:
    options = BenchOptions(data_parallel_size=2, speculative_config={"method": "synthetic", "accuracy": [0.7]})
    with pytest.raises(ConfigError, match="speculative_config method 'synthetic' has to know every answer"):
        plan_of(options)
