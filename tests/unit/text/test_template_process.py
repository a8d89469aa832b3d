"""Chat templates in processes: the same text, and an end in any case."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest

from penstock.core import RequestError
from penstock.text import template_process
from penstock.text.template_process import MOST_CHARACTERS, BrokenTemplate, TemplateProcesses, template_processes

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
    assert processes.render(asked) == (render_jinja_template(**asked)[0][0], [])


def test_marks_are_transformers_own(processes: TemplateProcesses) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = job(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}",
        return_assistant_tokens_mask=True,
    )
    texts, marks = render_jinja_template(**asked)
    assert processes.render(asked) == (texts[0], [[0, 14]])
    assert [list(mark) for mark in marks[0]] == [[0, 14]]


def test_what_is_not_json_is_the_requests_error(processes: TemplateProcesses) -> None:
    for strange in (object(), {1, 2}, {("a", "b"): 1}):
        with pytest.raises(RequestError, match="not JSON"):
            processes.render(job("fine", strange=strange))


def test_a_forked_child_has_processes_of_its_own() -> None:
    """Its end, and what it renders, leave the parent's alone."""
    ours = template_processes()
    assert ours.render(job("fine")).text == "fine"
    child = os.fork()
    if child == 0:
        theirs = template_processes()
        fine = theirs is not ours and theirs.render(job("theirs")).text == "theirs"
        del ours
        gc.collect()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert template_processes() is ours
    assert ours.render(job("ours")).text == "ours"


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
    assert processes.render(job("fine")).text == "fine"


def test_an_endless_one_is_ended_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = TemplateProcesses()
    problems: list[str] = []

    def loop() -> None:
        with pytest.raises(BrokenTemplate) as caught:
            processes.render(job(ENDLESS))
        problems.append(str(caught.value))

    endless = threading.Thread(target=loop)
    endless.start()
    while endless.is_alive():
        began = time.monotonic()
        assert processes.render(job("fine")).text == "fine"
        assert problems or time.monotonic() - began < template_process.SECONDS
    assert problems == [
        f"the chat template did not end within {template_process.SECONDS:g} s; shorten the messages, or change it"
    ]
    assert processes.render(job("fine")).text == "fine"
