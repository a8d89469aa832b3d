"""Chat templates rendered without transformers, and tokenizers of GGUF files: the same as with it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.files import MORE_TEMPLATES
from penstock.text.rendering import render_template
from penstock.text.tokenizer import TAKEN
from penstock.text.tokenizer_bounds import PlainTokenizer
from tests.gguf_files import TEMPLATE, make_gguf

ROOT = Path(__file__).parents[3]
FILES = (*sorted((ROOT / "tests").glob("**/*.jinja")), ROOT / "penstock/demo/target/chat_template.jinja")
SMALL = (
    TEMPLATE,
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% if loop.last %}{% break %}{% endif %}"
    "{% endfor %}",
    "  {% if documents is none %}\n  none\n  {% endif %}\n{{ tools | tojson(indent=2) }}{{ dict(a=1) }}",
    "{% set n = namespace(x=1, self=2) %}{% set n.x = 2 %}{{ n.x }}{{ dict.fromkeys('ab', 1) }}"
    "{{ strftime_now('%Y') }}",
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content | trim }};{% endfor %}",
    "{{ messages[-1]['content'] }}{{ messages[-1].content[0].text }}",
)
TALKS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "turn the wheel"}],
    [
        {"role": "system", "content": "be <brief> & 'kind'"},
        {"role": "user", "content": "水 \n"},
        {"role": "assistant", "content": "It turns. ", "reasoning": "wheels do"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "parts "}]}],
)
TOOL = {"type": "function", "function": {"name": "turn", "description": "<>", "parameters": {"type": "object"}}}


def outcome(render: Any, **job: Any) -> Any:
    try:
        text, marked = render(**job)
    except Exception as error:
        return type(error)
    return (text, marked) if isinstance(text, str) else (text[0], marked[0] if marked else [])


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(
    "asked", ["", "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"]
)
def test_texts_marks_and_kinds_of_errors_are_transformers_own(asked: str, tools: Any) -> None:
    for template in (*(file.read_text(encoding="utf-8") for file in FILES), *SMALL):
        for talk in TALKS:
            job = {"conversations": [talk], "chat_template": template, "tools": tools, "bos_token": "<s>"}
            job |= {asked: True} if asked else {}
            assert outcome(render_template, **job) == outcome(render_jinja_template, **job)


@pytest.mark.parametrize(
    "template",
    [
        "{{ namespace(_x=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ dict.__mro__ }}{{ dict.mro() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ nothing.at.all }}",
        "{% endif %}",
    ],
)
def test_what_a_template_may_not_do(template: str) -> None:
    job = {"conversations": [TALKS[0]], "chat_template": template}
    found = outcome(render_template, **job)
    assert isinstance(found, type)
    assert found is outcome(render_jinja_template, **job)


def test_nothing_of_one_conversation_is_in_the_next() -> None:
    jobs = [
        {"conversations": [talk], "chat_template": SMALL[1], "return_assistant_tokens_mask": True} for talk in TALKS
    ]
    assert [render_template(**job) for job in jobs[:2]] == [outcome(render_jinja_template, **job) for job in jobs[:2]]


def test_variables_of_a_template_may_not_be_transformers_arguments() -> None:
    theirs = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {"messages", *theirs} - {"self"} == TAKEN


@pytest.mark.parametrize("more", [(), ("tool_use",), ("tool_use", "rag")])
@pytest.mark.parametrize("has_default", [True, False])
def test_a_files_tokenizer_is_transformers_own(more: tuple[str, ...], has_default: bool, tmp_path: Path) -> None:
    entries = {f"tokenizer.chat_template.{name}": f"{name} {{{{ messages }}}}" for name in more}
    # A description of another name has the file a folder of its own.
    folder = open_checkpoint(str(make_gguf(tmp_path, entries={**entries, "general.url": str(tmp_path)}))).path
    if not has_default:
        (folder / "chat_template.jinja").unlink()
    assert len(list((folder / MORE_TEMPLATES).glob("*"))) == len(more)
    own, theirs = PlainTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert own.chat_template == theirs.chat_template
    assert own.special_tokens_map == theirs.special_tokens_map
    for name in ("bos_token", "eos_token_id"):
        assert getattr(own, name) == getattr(theirs, name)
    assert len(own) == len(theirs)
    for text in ("a text that the th is in", "  two spaces, é, 日本語\n", "</s> is <pad>", ""):
        for special in (True, False):
            ids = own.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert own.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    for asked in ({}, {"tools": []}, {"chat_template": "tool_use"}, {"chat_template": "{{ x }}"}):
        found = []
        for tokenizer in (own, theirs):
            try:
                found.append(tokenizer.get_chat_template(**asked))
            except ValueError:
                found.append(None)
        assert found[0] == found[1]
