"""Content in the form that a template reads, and what it looks for in messages."""

from __future__ import annotations

import pytest

from penstock.text.chat import ChatFormat, chat_prompt
from penstock.text.templates import TemplateFacts, template_facts
from penstock.text.tokenizer import Tokenizer
from tests.unit.text.conftest import byte_level

PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
GUARD = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}{% for turn in turns %}"
    "{% set content = turn['content'] %}{{ turn.role }}: {% for c in content %}{{ c['text'] }}{% endfor %};{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}{% for p in m.content %}"
    "({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
CUT = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}<s>{{ c }}{% endfor %}"
)
TEXT_AND_PARTS = ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (PARTS, TemplateFacts(walks_parts=True, takes_text=False)),
        (GUARD, TemplateFacts(walks_parts=True, takes_text=False)),
        (EITHER, TemplateFacts(walks_parts=True, takes_text=True)),
        (TEXT, TemplateFacts()),
        (MARKED, TemplateFacts()),
        ("{% if %}", TemplateFacts()),
        (CUT, TemplateFacts(looked_for=frozenset({"</think>"}))),
    ],
)
def test_what_is_told_of_a_template(template: str, told: TemplateFacts) -> None:
    assert template_facts(template) == told


@pytest.mark.parametrize(
    ("template", "rendered"),
    [(PARTS, ["ab", "ab"]), (GUARD, ["user: ab;"] * 2), (EITHER, ["[ab]", "(a)(b)"]), (TEXT, ["ab;", "ab;"])],
)
def test_content_comes_in_the_form_that_the_template_reads(template: str, rendered: list[str]) -> None:
    tokenizer = with_template(template)
    for content, wanted in zip(TEXT_AND_PARTS, rendered, strict=True):
        talk = [{"role": "user", "content": content}]
        assert chat_prompt(tokenizer, talk, ChatFormat())["prompt"] == wanted


def test_what_a_template_looks_for_is_seen_in_what_the_assistant_said() -> None:
    tokenizer = with_template(CUT, "</think>")
    said = {"role": "assistant", "content": "because</think>so </think>yes"}
    asked = {"role": "user", "content": "what is </think>?"}
    found = chat_prompt(tokenizer, [asked, said], ChatFormat())
    assert found["prompt"] == "<s>what is </think>?<s>yes"
    think = tokenizer.encode("</think>", add_special_tokens=False)
    assert len(think) == 1
    assert think[0] not in found["prompt_token_ids"], "in a user's text it is text"


def with_template(template: str, *special: str) -> Tokenizer:
    tokenizer = byte_level(*special)
    tokenizer.use_chat_template(template)
    return tokenizer
