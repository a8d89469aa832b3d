"""Settings and requests that leave nothing to time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.core import CompletionOutput, FinishReason, RequestOutput, SamplingParams
from penstock.lab.bench.summary import first_token_remark, silent_settings
from penstock.lab.grid import Question, Setting
from tests.unit.lab.bench.runs import a_request, a_run
from tests.unit.text.conftest import byte_level

CHAT, CODE = Setting("chat", 0.0), Setting("code", 0.0)
QUESTIONS = [Question(setting, 0, "a", SamplingParams(seed=0)) for setting in (CHAT, CODE)]


def llm() -> Any:
    tokenizer = byte_level()
    tokenizer.use_chat_template("{{ messages[0].role }}: {{ messages[0].content }}")
    return SimpleNamespace(get_tokenizer=lambda: tokenizer)


def ended(reason: int | str | None = None, text: str = "") -> list[RequestOutput]:
    token = byte_level().eos_token_ids[0]
    return [RequestOutput("0", "a", [1], [CompletionOutput(0, [token], text, FinishReason.STOP, reason)], True)]


def test_a_setting_without_a_token_to_time_has_its_reason() -> None:
    silent = a_run("autoregressive", 1.0, tokens=0, outputs=ended())
    runs = [silent, a_run("pipedec", 1.0, tokens=0), a_run("autoregressive", 1.0, prompt_set="code")]
    found = silent_settings(llm(), runs, QUESTIONS)
    assert list(found) == [CHAT]
    assert found[CHAT].startswith("chat, T = 0: nothing to time; the request: the model's first token was an end token")
    assert "--raw" in found[CHAT]


def test_a_stop_string_that_came_first_is_named() -> None:
    runs = [a_run("autoregressive", 1.0, tokens=0, outputs=ended(reason="a", text="a"))]
    assert "no request has more than 1 token (it ended with 'a')" in silent_settings(llm(), runs, QUESTIONS)[CHAT]


def test_requests_that_are_in_no_speed_up_are_counted() -> None:
    none = {**a_request(2, 1.0), "tokens": 0}
    run = a_run("autoregressive", 1.0, requests=[a_request(0, 1.0), none])
    assert first_token_remark(CHAT, [run]) == (
        "chat, T = 0: 1 of 2 requests ended with their first token, left out of the speed-ups."
    )
    assert first_token_remark(CHAT, [a_run("autoregressive", 1.0)]) is None
