"""Typos are recognised, other words are not."""

from __future__ import annotations

import pytest

from penstock.config import meant
from penstock.server.openai.protocol import ChatCompletionRequest


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("temprature", "temperature"),
        ("widht", "width"),
        ("max-tokens", "max_tokens"),
        ("maxtokens", "max_tokens"),
        ("eagel3", "eagle3"),
        ("dmeo", "demo"),
        ("gqu", "gpu"),
        ("local-", "local-N"),
        ("board4", "board-4"),
        ("regen", "regenerate"),
        ("Temperature", "temperature"),
    ],
)
def test_typos_are_recognised(typed: str, known: str) -> None:
    assert meant(typed, ["stop", "something else", known]) == known


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("store", "stop"),
        ("top_a", "top_p"),
        ("eagle2", "eagle3"),
        ("frequency_penalty", "presence_penalty"),
        ("top_logprobs", "logprobs"),
        ("min_tokens", "max_tokens"),
        ("metadata", "max_tokens"),
        ("reasoning_effort", "reasoning"),
        ("", "stop"),
    ],
)
def test_another_meaning_is_no_typo(typed: str, known: str) -> None:
    assert meant(typed, [known]) is None


@pytest.mark.parametrize("field", ["input", "previous_response_id", "audio", "modalities", "length"])
def test_openais_other_fields_are_nobodys_typos(field: str) -> None:
    assert meant(field, ChatCompletionRequest.model_fields) is None


def test_the_nearest_is_named() -> None:
    assert meant("stag", ["stages", "stage"]) == "stage"
