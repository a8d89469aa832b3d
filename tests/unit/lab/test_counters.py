"""Speculation by the server's counters."""

from __future__ import annotations

import pytest

from penstock.clients.api import Usage
from penstock.lab.serving_load import Speculation, between, of_usages, read_counters

VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{model_name="a"} 20.0
vllm:spec_decode_num_accepted_tokens_total{model_name="a"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0
"""


@pytest.mark.parametrize("engine", ["vllm", "penstock"])
def test_counters_of_all_engines_are_added_up(engine: str) -> None:
    assert read_counters(VLLM.replace("vllm:", f"{engine}:")) == Speculation(7, 20, 14)


@pytest.mark.parametrize("text", ["", VLLM.split("vllm:spec_decode_num_draft_tokens")[0], "<html>not found</html>"])
def test_no_speculation_is_reported(text: str) -> None:
    assert read_counters(text) is None


def test_what_lies_between_two_readings() -> None:
    found = between(Speculation(7, 20, 14), Speculation(9, 30, 20))
    assert found == Speculation(2, 10, 6)
    assert (found.acceptance_rate, found.acceptance_length) == (0.6, 4.0)
    assert between(None, Speculation(9, 30, 20)) is None
    assert between(Speculation(9, 30, 20), None) is None


def test_without_drafts_there_is_no_rate() -> None:
    assert Speculation(0, 0, 0).acceptance_rate is None
    assert Speculation(0, 0, 0).acceptance_length is None


def test_usages() -> None:
    usages = [Usage(1, 2), Usage(1, 2, accepted=3), Usage(1, 2, accepted=1, rejected=2)]
    assert of_usages(usages) == Speculation(None, 6, 4)
    assert of_usages([Usage(1, 2)]) is None
