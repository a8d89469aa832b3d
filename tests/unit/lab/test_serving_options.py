"""Options that ``penstock bench serve`` refuses before it sends anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.core import ConfigError
from penstock.lab.serving_load import ServingOptions, parse_concurrency, parse_goodput


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpoint": "embeddings"}, "endpoint is 'embeddings'; it has to be completions or chat"),
        ({"request_rate": 0.0}, "request_rate is 0.0"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"burstiness": 0.0}, "burstiness is 0.0"),
        ({"concurrency": (0,)}, "at least 1"),
        ({"concurrency": (2, 2)}, "different numbers"),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"num_warmups": -1}, "num_warmups is -1"),
        ({"output_len": 0}, "output_len is 0"),
        ({"input_len": 0}, "input_len is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"dataset": Path("a.jsonl"), "input_len": 3}, "the dataset is a file; remove one"),
        ({"json": Path("/none/such/a.json")}, "in a folder that exists"),
        ({"plot": Path("a.png"), "concurrency": (4,)}, "several"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServingOptions(**given)
    assert words in str(caught.value)


def test_lists() -> None:
    assert parse_concurrency("1,2, 4") == (1, 2, 4)
    assert parse_goodput("ttft:500, tpot:50.5") == {"ttft": 500.0, "tpot": 50.5}


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1.5"])
def test_what_is_no_list_of_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="whole numbers with commas between"):
        parse_concurrency(text)


@pytest.mark.parametrize(
    ("text", "words"), [("ttfd:5", "did you mean 'ttft'"), ("ttft", "like ttft:500"), ("itl:5", "goodput names 'itl'")]
)
def test_what_is_no_goodput(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_goodput(text)
