"""When a completion decodes its text: at once where that may end it, else when the engine has time for it."""

from __future__ import annotations

import pytest

from penstock import SamplingParams
from penstock.core import FinishReason
from penstock.engine.completion import Completion
from penstock.engine.options import DEMO
from penstock.messages import SampledToken
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.conftest import byte_fallback

TEXT = "def step(rows):\n    return rows\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO / "target")


def completion(tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> Completion:
    return Completion(0, SamplingParams(stop=stop), IncrementalDetokenizer(tokenizer, stop=stop), started=0.0)


def test_text_is_decoded_when_the_engine_has_time(tokenizer: Tokenizer) -> None:
    one, ids = completion(tokenizer), tokenizer.encode(TEXT)
    assert [one.append(SampledToken(0, token), at=1.0) for token in ids] == [None] * len(ids)
    assert one.output.token_ids == ids
    assert one.output.text == ""
    one.detokenize_pending()
    assert TEXT.startswith(one.output.text)
    assert one.output.text
    one.detokenize_pending()
    one.finish(FinishReason.LENGTH, at=2.0)
    assert one.output.text == TEXT


def test_the_end_brings_all_of_the_text(tokenizer: Tokenizer) -> None:
    one = completion(tokenizer)
    for token in tokenizer.encode(TEXT):
        one.append(SampledToken(0, token), at=1.0)
    one.finish(FinishReason.LENGTH, at=2.0)
    assert one.output.text == TEXT


def test_a_stop_string_ends_it_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    one, ids = completion(tokenizer, stop=("return",)), tokenizer.encode(TEXT)
    reasons = [one.append(SampledToken(0, token), at=1.0) for token in ids]
    first = reasons.index(FinishReason.STOP)
    assert "return" in tokenizer.decode(ids[: first + 1])
    assert "return" not in tokenizer.decode(ids[:first])
    assert one.output.text == TEXT[: TEXT.index("return")]


def test_a_stop_string_that_only_the_end_makes_certain_is_a_stop_too() -> None:
    """A byte-fallback token might begin another character: its text is known only if no token follows."""
    tokenizer = byte_fallback()
    (token,) = (one for one in tokenizer.byte_ids if tokenizer.token_bytes(one) == b"!")
    one = completion(tokenizer, stop=("!",))
    assert one.append(SampledToken(0, token), at=1.0) is None
    one.finish(FinishReason.LENGTH, at=2.0)
    assert (one.output.finish_reason, one.output.stop_reason, one.output.text) == (FinishReason.STOP, "!", "")


@pytest.mark.parametrize(("tokens", "plain_s", "speed_up"), [(9, 0.5, 2.0), (8, 0.5, None), (9, 0.0, None)])
def test_a_speed_beside_plain_decodings_where_there_is_enough_to_compare(
    tokens: int, plain_s: float, speed_up: float | None
) -> None:
    one = Completion(0, SamplingParams(), None, started=0.0)
    for number in range(tokens):
        one.append(SampledToken(number, 0), at=1.0)
    one.finish(FinishReason.LENGTH, at=1.0 + (tokens - 1) / 4, plain_s=plain_s)
    assert one.output.speed_up == speed_up
