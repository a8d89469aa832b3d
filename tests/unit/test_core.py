"""Sampling parameters that cannot work are refused with their name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock import RequestError, SamplingParams, StructuredOutputsParams


def test_what_is_given_is_kept_as_pythons_own() -> None:
    params = SamplingParams(logit_bias={np.int64(3): np.float32(1.5)}, allowed_token_ids=np.array([4, 5]))
    assert params.logit_bias == {3: 1.5}
    assert params.allowed_token_ids == (4, 5)
    assert [type(value) for value in (*params.logit_bias.items(), *params.allowed_token_ids)] == [tuple, int, int]
    assert SamplingParams(logit_bias={}).logit_bias == {}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it has to be between -2 and 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'; it has to be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it has to be between 0.001 and 1000"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\]; it has to map token ids to biases"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias is '3'; it has to be a whole number"),
        ({"logit_bias": {3: "1"}}, "logit_bias is '1'; it has to be a number"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias is .*; it has to be token ids and biases"),
        ({"logit_bias": {3: 100.5}}, "logit_bias is .*; it has to be biases between -100 and 100"),
        ({"logit_bias": {3: float("nan")}}, "biases between"),
        ({"allowed_token_ids": []}, r"allowed_token_ids is \(\); it has to be None, or token ids, at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": 3}, "allowed_token_ids is 3; it has to be a list"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs is .* a StructuredOutputsParams"),
    ],
)
def test_parameters_that_cannot_work_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        SamplingParams(**given)


def test_a_mask_and_a_grammar_exclude_each_other() -> None:
    structure = StructuredOutputsParams(regex="a+")
    with pytest.raises(RequestError, match="allowed_token_ids and structured_outputs"):
        SamplingParams(allowed_token_ids=[3], structured_outputs=structure)


def test_a_structure_is_exactly_one_thing() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=json.dumps(schema), json_object=False)
    assert StructuredOutputsParams(choice=["b", "a"]).choice == ("b", "a")
    assert StructuredOutputsParams(json_object=True).kind == "json_object"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "structured_outputs has nothing; it has to have exactly one of json, json_object, regex"),
        ({"json_object": False}, "structured_outputs has nothing"),
        ({"json": {}, "regex": "a"}, "structured_outputs has json and regex"),
        ({"json": "{"}, "structured_outputs.json is not JSON: "),
        ({"json": {"a": {1}}}, "structured_outputs.json is not JSON: "),
        ({"json": {"maximum": float("nan")}}, "structured_outputs.json is not JSON: "),
        ({"json": "[1]"}, r"structured_outputs.json is \[1\]; it has to be a JSON schema"),
        ({"json_object": "yes"}, "structured_outputs.json_object is 'yes'"),
        ({"regex": ""}, "structured_outputs.regex is ''; it has to be a string, not empty"),
        ({"regex": 5}, "structured_outputs.regex is 5"),
        ({"grammar": "start: \ud800"}, "structured_outputs.grammar is not valid Unicode"),
        ({"choice": []}, r"structured_outputs.choice is \[\]; it has to be a list of strings, at least one"),
        ({"choice": "ab"}, "structured_outputs.choice is 'ab'; it has to be a list"),
        ({"choice": 5}, "structured_outputs.choice is 5; it has to be a list"),
        ({"choice": ["a", ""]}, "structured_outputs.choice is ''; it has to be a string, not empty"),
        ({"choice": ["\ud800"]}, "structured_outputs.choice is not valid Unicode"),
        ({"regex": "a" * 65_537}, "structured_outputs.regex is 65537 characters long; it has to be at most 65536"),
        ({"choice": ["ab"] * 40_000}, "structured_outputs.choice is 80000 characters long"),
        ({"json": {"enum": ["a" * 65_536]}}, "structured_outputs.json is 65550 characters long"),
    ],
)
def test_structures_that_cannot_work_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize("made", [SamplingParams, StructuredOutputsParams])
def test_a_field_that_there_is_not_is_refused_with_the_nearest(made: type) -> None:
    with pytest.raises(RequestError, match=f"foo is not a field of {made.__name__}; there is "):
        made(foo=1)
    near, meant = ("temprature", "temperature") if made is SamplingParams else ("regexp", "regex")
    with pytest.raises(RequestError, match=f"{near} is not a field of {made.__name__}; did you mean '{meant}'"):
        made(**{near: 1})


def test_half_a_character_is_no_stop_string() -> None:
    with pytest.raises(RequestError, match=r"stop is .*; it has to be Unicode"):
        SamplingParams(stop=["fine", "a\ud800"])
