"""Chat templates in processes: the same text, and an end in any case."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from penstock.core import RequestError
from penstock.text import template_process
from penstock.text.template_process import MOST_CHARACTERS, TemplateProcesses

TALK = [{"role": "user", "content": "turn the wheel"}]
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def job(template: str, **variables: Any) -> dict[str, Any]:
    return {"conversations": [TALK], "chat_template": template, "add_generation_prompt": True, **variables}


@pytest.fixture(scope="module")
def processes() -> TemplateProcesses:
    return TemplateProcesses()


def test_the_text_is_transformers_own(processes: TemplateProcesses) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = job(
        "{{ bos }}{% for m in messages %}{{ m | tojson }} 水\ud800{% endfor %}{{ add_generation_prompt }}", bos="<s>"
    )
    assert processes.render(asked) == render_jinja_template(**asked)[0][0]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.nothing.at.all }}", "no attribute"),
        ("{% if %}", "Expected an expression"),
        ("{{ [].__class__ }}{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 10000000000 }}", "more memory"),
        ("{{ range(100001) | list }}", "range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (f"{{{{ 'a' * {MOST_CHARACTERS + 1} }}}}", f"at most {MOST_CHARACTERS}"),
    ],
)
def test_whatever_a_template_raises_is_the_requests_error(
    processes: TemplateProcesses, template: str, says: str
) -> None:
    with pytest.raises(RequestError, match=f"the chat template .*{says}"):
        processes.render(job(template))
    assert processes.render(job("fine")) == "fine"


def test_an_endless_one_is_ended_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = TemplateProcesses()
    problems: list[str] = []

    def loop() -> None:
        with pytest.raises(RequestError) as caught:
            processes.render(job(ENDLESS))
        problems.append(str(caught.value))

    endless = threading.Thread(target=loop)
    endless.start()
    while endless.is_alive():
        began = time.monotonic()
        assert processes.render(job("fine")) == "fine"
        assert problems or time.monotonic() - began < template_process.SECONDS
    assert problems == [
        f"the chat template did not end within {template_process.SECONDS:g} s; shorten the messages, or change it"
    ]
    assert processes.render(job("fine")) == "fine"
