"""Every field of the classes of options, given values of every type: taken where it states the type, else named."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final

import pytest

from penstock import AsyncLLM, Replicas, SamplingParams
from penstock.config import FieldError
from penstock.core import PenstockError
from penstock.engine.llm import LLM
from penstock.engine.options import EngineOptions
from penstock.server.settings import Listening, ServerSettings

CLASSES: Final[list[type[Any]]] = [EngineOptions, ServerSettings, Listening, SamplingParams]
VALUES: Final = [True, "x", 3, 1.5, None, [1], ["x"], {"a": 1}, {3: 0.5}, b"x", Path("x"), object()]
STANDS_FOR: Final[dict[type, tuple[type, ...]]] = {float: (int,), str: (Path,), Path: (str,), tuple: (list,)}
"""Types whose values are taken for another one's."""
UNSTATED: Final = {("SamplingParams", "stop"): (NoneType,), ("SamplingParams", "stop_token_ids"): (NoneType,)}
"""Types that a field takes beside those that it states: vLLM's clients send null for no stop."""


def stated(kind: type[Any], name: str) -> set[type]:
    hint = typing.get_type_hints(kind)[name]
    arms = typing.get_args(hint) if typing.get_origin(hint) not in (None, tuple, list, dict, Mapping) else (hint,)
    types = {typing.get_origin(arm) or arm for arm in arms}
    others = {other for one in types for other in STANDS_FOR.get(one, ())}
    return types | others | set(UNSTATED.get((kind.__name__, name), ()))


CASES = [(kind, one.name) for kind in CLASSES for one in dataclasses.fields(kind)]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind.__name__}.{name}" for kind, name in CASES])
def test_a_value_of_another_type_is_refused_by_its_fields_name(kind: type[Any], name: str) -> None:
    allowed = stated(kind, name)
    for value in VALUES:
        found = outcome(kind, name, value)
        if isinstance(found, PenstockError):
            # An unknown option of a speculative_config is named itself.
            assert name in str(found) or isinstance(value, Mapping), (value, found)
        else:
            assert type(value) in allowed or isinstance(value, Mapping | Path), value
            assert found is None or isinstance(found, tuple(allowed)), value


def outcome(kind: type[Any], name: str, value: object) -> Any:
    """The field's value in an object made with it, or the error; any other error than ours fails the test."""
    try:
        return getattr(kind(**{name: value}), name)
    except PenstockError as error:
        return error


@pytest.mark.parametrize("engine", [LLM, AsyncLLM, Replicas])
def test_an_unknown_keyword_is_answered_with_the_nearest(engine: type[Any]) -> None:
    with pytest.raises(FieldError, match=rf"^max_num_seq is not an option of {engine.__name__}; did you mean 'max_num"):
        engine(max_num_seq=3)


@pytest.mark.parametrize("engine", [AsyncLLM, Replicas])
@pytest.mark.parametrize("given", [{"max_queue": 0}, {"max_queue": "3"}, {"idle_timeout": "60"}, {"idle_timeout": 0}])
def test_what_services_alone_take_is_checked_before_anything_starts(engine: type[Any], given: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=f"^{next(iter(given))} is "):
        engine(**given)
