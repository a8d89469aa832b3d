"""An answer in points, step by step, with somebody who plays the target."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.outlines.steps import KINDS, LEAST, SHORT, Answering, Ask, Dialogue, Forms, Step, check_outline
from penstock.text.chat import ChatFormat
from penstock.text.tokenizer import Tokenizer
from tests.unit.text.conftest import byte_level

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ': ' + m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
QUESTION = "What are the benefits of trees?"
OUTLINE = "1. Clean air\n2. Shade"
PARAMS = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = byte_level()
    found.use_chat_template(TEMPLATE)
    return found


class Target:
    """Plays the target: ``liked`` is its favourite form, ``form`` what it finds the question's to be."""

    def __init__(self, tokenizer: Tokenizer, form: str = "list", outline: str = OUTLINE, liked: str = "text") -> None:
        self._tokenizer = tokenizer
        self._form, self._outline, self._liked = form, outline, liked
        self.asked: list[Ask] = []
        self.end = FinishReason.STOP

    def answer(self, ask: Ask) -> RequestOutput:
        self.asked.append(ask)
        if ask.name.startswith("sample"):
            return self._output(ask, [0], "", [self._scores(KINDS[(int(ask.name[7:]) - 1) // 3])])
        if ask.name == "form":
            allowed, bias = ask.params.allowed_token_ids, ask.params.logit_bias
            assert allowed is not None
            assert bias is not None
            scores = self._scores(self._form)
            best = max(allowed, key=lambda token: scores[token].logprob + bias[token])
            return self._output(ask, [best], "")
        text = self._outline if ask.name == "outline" else f" {ask.name}"
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self._output(ask, [*ids, self._tokenizer.eos_token_ids[0]], text)

    def _scores(self, form: str) -> dict[int, Logprob]:
        """Labels begin with different letters, which this tokenizer has tokens of."""
        tokens = [self._tokenizer.encode(kind, add_special_tokens=False)[0] for kind in KINDS]
        return {
            token: Logprob(-5.0 + 3.0 * (kind == self._liked) + 1.0 * (kind == form), 1)
            for kind, token in zip(KINDS, tokens, strict=True)
        }

    def _output(self, ask: Ask, ids: list[int], text: str, logprobs: Any = None) -> RequestOutput:
        one = CompletionOutput(0, ids, text, self.end if ask.name == "outline" else FinishReason.STOP, None, logprobs)
        return RequestOutput(ask.name, ask.prompt["prompt"], ask.prompt["prompt_token_ids"], [one], True)


def dialogue(tokenizer: Tokenizer, question: str = QUESTION) -> Dialogue:
    return Dialogue(tokenizer, [{"role": "user", "content": question}], ChatFormat())


def last_step(
    target: Target, talk: Dialogue, mode: str, params: SamplingParams = PARAMS, forms: Forms | None = None
) -> Step:
    steps = Answering(talk, params, forms or Forms(), 4096).steps(mode)
    step = next(steps)
    while not step.last:
        step = steps.send([target.answer(ask) for ask in step.asks])
    return step


def test_on_asks_for_an_outline_and_then_for_all_points_at_once(tokenizer: Tokenizer) -> None:
    target = Target(tokenizer)
    step = last_step(target, dialogue(tokenizer), "on")
    assert [ask.name for ask in target.asked] == ["outline"]
    assert [ask.name for ask in step.asks] == ["point-1", "point-2"]
    assert step.headings == ["1. **Clean air**:", "\n\n2. **Shade**:"]
    assert (step.report.used, step.report.titles, step.report.kind) == (True, ["Clean air", "Shade"], None)
    assert [ask.params.max_tokens for ask in step.asks] == [50, 50]


def test_points_begin_with_the_very_tokens_of_question_and_outline(tokenizer: Tokenizer) -> None:
    target = Target(tokenizer)
    step = last_step(target, dialogue(tokenizer), "on")
    (outline,) = target.asked
    shared = outline.prompt["prompt_token_ids"] + tokenizer.encode(OUTLINE, add_special_tokens=False)
    for ask in step.asks:
        assert ask.prompt["prompt_token_ids"][: len(shared)] == shared
        assert tokenizer.decode(ask.prompt["prompt_token_ids"], skip_special_tokens=False) == ask.prompt["prompt"]
    assert step.asks[1].prompt["prompt"].endswith("<s>assistant: **Shade**:")


def test_only_the_guide_is_pinned(tokenizer: Tokenizer) -> None:
    one, other = Target(tokenizer), Target(tokenizer)
    last_step(one, dialogue(tokenizer), "on")
    last_step(other, dialogue(tokenizer, "What does it take to build a mill?"), "on")
    (first,), (second,) = one.asked, other.asked
    assert first.pinned == second.pinned > 0
    ids = [ask.prompt["prompt_token_ids"] for ask in (first, second)]
    assert ids[0][: first.pinned] == ids[1][: first.pinned]
    assert QUESTION not in tokenizer.decode(ids[0][: first.pinned])


@pytest.mark.parametrize("form", KINDS)
def test_auto_has_the_target_name_the_form_whatever_label_it_likes(tokenizer: Tokenizer, form: str) -> None:
    target = Target(tokenizer, form)
    step = last_step(target, dialogue(tokenizer), "auto")
    assert step.report.kind == form
    assert step.report.used == (form == "list")
    asked = next(ask for ask in target.asked if ask.name == "form")
    assert asked.params.max_tokens == 1
    assert len(asked.params.allowed_token_ids or ()) == len(KINDS)
    if form != "list":
        assert [ask.prompt for ask in step.asks] == [dialogue(tokenizer).plain()]
        assert step.asks[0].params == PARAMS
        assert repr(form) in step.report.reason


def test_what_a_target_likes_is_learned_once(tokenizer: Tokenizer) -> None:
    forms, target = Forms(), Target(tokenizer)
    for _ in range(2):
        last_step(target, dialogue(tokenizer), "auto", forms=forms)
    assert [ask.name for ask in target.asked].count("sample-1") == 1
    assert [ask.name for ask in target.asked].count("form") == 2


def test_a_short_answer_is_plain_without_a_question(tokenizer: Tokenizer) -> None:
    target = Target(tokenizer)
    short = SamplingParams(temperature=0, max_tokens=SHORT - 1)
    step = last_step(target, dialogue(tokenizer), "auto", short)
    assert (target.asked, step.report.used, step.report.kind) == ([], False, "short")


@pytest.mark.parametrize("outline", ["1. Only one", "1. Same\n2. same", "no list at all"])
def test_an_outline_that_cannot_be_read_gives_the_plain_answer(tokenizer: Tokenizer, outline: str) -> None:
    step = last_step(Target(tokenizer, outline=outline), dialogue(tokenizer), "on")
    assert [ask.prompt for ask in step.asks] == [dialogue(tokenizer).plain()]
    assert (step.headings, step.report.used) == ([""], False)
    assert "outline" in step.report.reason


def test_an_outline_that_is_cut_off_has_its_whole_lines(tokenizer: Tokenizer) -> None:
    target = Target(tokenizer, outline=OUTLINE + "\n3. Woo")
    target.end = FinishReason.LENGTH
    assert last_step(target, dialogue(tokenizer), "on").report.titles == ["Clean air", "Shade"]


def test_points_without_room_are_the_plain_answer(tokenizer: Tokenizer) -> None:
    few = SamplingParams(temperature=0, max_tokens=2 * LEAST - 1)
    step = last_step(Target(tokenizer), dialogue(tokenizer), "on", few)
    assert not step.report.used
    assert f"leave {LEAST - 1} tokens" in step.report.reason
    steps = Answering(dialogue(tokenizer), PARAMS, Forms(), 300).steps("on")
    assert "max_model_len is 300" in next(steps).report.reason


def test_a_template_without_system_messages_has_the_guide_in_the_users(tokenizer: Tokenizer) -> None:
    other = byte_level()
    other.use_chat_template(NO_SYSTEM)
    target = Target(other)
    last_step(target, dialogue(other), "on")
    prompt = target.asked[0].prompt["prompt"]
    assert prompt.startswith("<s>user: You are")
    assert prompt.endswith(f"\n\n{QUESTION}\n<s>assistant: ")


def test_a_system_message_follows_the_guide(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
    target = Target(tokenizer)
    last_step(target, Dialogue(tokenizer, messages, ChatFormat()), "on")
    assert f"\n\nBe kind.\n<s>user: {QUESTION}\n" in target.asked[0].prompt["prompt"]


def test_a_text_is_a_question_without_a_template(tokenizer: Tokenizer) -> None:
    target = Target(tokenizer)
    step = last_step(target, Dialogue.of_text(tokenizer, QUESTION), "on")
    assert target.asked[0].prompt["prompt"].endswith(f"\n\n{QUESTION}\n\n")
    assert step.asks[1].prompt["prompt"].endswith("\n\n**Shade**:")


@pytest.mark.parametrize(
    ("mode", "params", "named"),
    [
        ("sometimes", PARAMS, "outline_decoding"),
        ("auto", SamplingParams(n=2), "n is 2"),
        ("on", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), "structured_outputs"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(mode: str, params: SamplingParams, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        check_outline(mode, params)


def test_a_conversation_that_ends_with_an_answer_asks_nothing(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="outline_decoding"):
        Dialogue(tokenizer, [{"role": "assistant", "content": "It turns."}], ChatFormat())
