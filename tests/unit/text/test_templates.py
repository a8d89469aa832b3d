"""Chat templates rendered by workers: the same text, and an end in any case."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import RequestError
from penstock.text import templates
from penstock.text.templates import BrokenTemplate, render
from penstock.text.worker_tasks import MOST_CHARACTERS

TALK = [{"role": "user", "content": "turn the wheel"}]
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def job(template: str, **variables: Any) -> dict[str, Any]:
    return {"conversations": [TALK], "chat_template": template, "add_generation_prompt": True, **variables}


def test_the_text_is_transformers_own() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = job(
        "{{ bos }}{% for m in messages %}{{ m | tojson }} 水\ud800{% endfor %}{{ add_generation_prompt }}", bos="<s>"
    )
    assert render(asked) == (render_jinja_template(**asked)[0][0], [])


def test_marks_are_transformers_own() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = job(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}",
        return_assistant_tokens_mask=True,
    )
    texts, marks = render_jinja_template(**asked)
    assert render(asked) == (texts[0], [[0, 14]])
    assert [list(mark) for mark in marks[0]] == [[0, 14]]


def test_what_is_not_json_is_the_requests_error() -> None:
    for strange in (object(), {1, 2}, {("a", "b"): 1}):
        with pytest.raises(RequestError, match="not JSON"):
            render(job("fine", strange=strange))


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
def test_whatever_a_template_raises_is_the_requests_error(template: str, says: str) -> None:
    with pytest.raises(RequestError, match=f"the chat template .*{says}"):
        render(job(template))
    assert render(job("fine")).text == "fine"


def test_an_endless_one_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    with pytest.raises(BrokenTemplate, match=r"the chat template did not end within 0\.3 s; shorten the messages"):
        render(job(ENDLESS))
    assert render(job("fine")).text == "fine"
