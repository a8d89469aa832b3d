"""The template's opening, and what counts as a question."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import ConfigError
from penstock.lab.trainer.data import distinct, opening_of
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.training import TEMPLATE

CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def test_a_special_token_ends_the_users_message(tokenizer: Tokenizer) -> None:
    tokenizer.use_chat_template(CHATML)
    opening = opening_of(tokenizer)
    assert tokenizer.decode(opening.tokens, skip_special_tokens=False) == "<s>user\n"
    assert [tokenizer.decode([token], skip_special_tokens=False) for token in opening.stop_token_ids] == ["</s>"]
    assert opening.stop == ()


@pytest.mark.parametrize(("end", "stop"), [("[/INST]", "[/INST]"), ("\n", "\n"), ("", "\n")])
def test_a_text_ends_the_users_message(tokenizer: Tokenizer, end: str, stop: str) -> None:
    tokenizer.use_chat_template("{% for message in messages %}[INST]{{ message['content'] }}" + end + "{% endfor %}")
    opening = opening_of(tokenizer)
    assert tokenizer.decode(opening.tokens) == "[INST]"
    assert (opening.stop, opening.stop_token_ids) == ((stop,), ())


def test_a_template_that_says_nothing_of_the_user_is_refused(tokenizer: Tokenizer) -> None:
    tokenizer.use_chat_template("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(ConfigError, match="self_generate: the chat template leaves out what the user says; give data"):
        opening_of(tokenizer)


def test_the_opening_is_where_the_users_message_begins(tokenizer: Tokenizer) -> None:
    tokenizer.use_chat_template(TEMPLATE)
    rendered = tokenizer.render([{"role": "user", "content": "two?"}], add_generation_prompt=False)
    assert rendered.startswith(tokenizer.decode(opening_of(tokenizer).tokens) + "two?")


@given(st.lists(st.sampled_from(["", " ", "A b", "a  B", "c", "C ", "d"])))
def test_a_question_counts_once_and_the_first_of_its_kind(attempts: list[str]) -> None:
    found = distinct(attempts)
    plain = [" ".join(text.lower().split()) for text in found]
    assert len(set(plain)) == len(plain)
    assert set(plain) == {" ".join(text.lower().split()) for text in attempts} - {""}
    firsts = [next(i for i, text in enumerate(attempts) if text == one) for one in found]
    assert firsts == sorted(firsts)
    for text in found:
        same = [one for one in attempts if " ".join(one.lower().split()) == " ".join(text.lower().split())]
        assert text == same[0]
