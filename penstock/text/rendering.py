"""Chat templates in transformers' dialect of Jinja: what the worker renders conversations with.

A template gives what transformers' ``render_jinja_template`` makes of it, for messages and variables of JSON's types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from jinja2 import Template, nodes, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates look for a message's reasoning. The first one given is the one that counts."""
OPEN_END: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text behind the last message by which its end is found again. The space shows whether the template strips texts."""


class Generation(Extension):
    """``{% generation %} .. {% endgeneration %}``: the characters that it makes are the assistant's."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call of ``_mark`` around its statements."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _mark(self, _: nodes.EvalContext, caller: Callable[[], str]) -> str:
        """Note which characters of the text the block makes, counted from its beginning."""
        text = caller()
        environment: Any = self.environment
        # ``written`` holds the pieces that ``render_template`` has got so far: their lengths are this block's place.
        first = sum(map(len, environment.written))
        environment.marked.append((first, first + len(text)))
        return text


class Dictionary:
    """``dict`` for templates: the type itself would lead them to Python's inside."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class Names(Namespace):
    """``namespace`` for templates, which may not store what Python would take for its own."""

    def __init__(*items: Any, **named: Any) -> None:  # ``self`` may be a name, too
        self, *rest = items
        given = dict(*rest, **named)
        for name in given:
            check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: Any) -> None:
    """Raise SecurityError for a name that Python itself uses."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: rename it")


def as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter ``tojson``: JSON as it is. Jinja's own makes it safe for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    """``raise_exception`` of templates: a template's own refusal of the messages."""
    raise TemplateError(message)


@lru_cache(maxsize=8)
def compiled(template: str) -> Template:
    """The template in transformers' dialect, in a sandbox. Raises TemplateSyntaxError."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dictionary(),
        "namespace": Names,
    }
    environment.written, environment.marked = [], []
    found: Template = environment.from_string(template)
    return found


def render_template(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    chat_template: str,
    return_assistant_tokens_mask: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> tuple[str, list[tuple[int, int]]]:
    """The only one of ``conversations`` as text, with the characters [first, last) of each marked part.

    Parts are told with ``return_assistant_tokens_mask`` alone. The arguments are those of transformers' function.

    With ``continue_final_message`` the text ends with the last message. Raises whatever the template does, and
    ValueError if the end of that message cannot be told.
    """
    (messages,) = conversations
    turns = [with_reasoning(message) for message in messages]
    variables = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    final = opened(turns) if continue_final_message else ""
    template = compiled(chat_template)
    environment: Any = template.environment
    environment.written, environment.marked = [], []
    for piece in template.generate(messages=turns, **variables):
        environment.written.append(piece)
    text = "".join(environment.written)
    marked = environment.marked if return_assistant_tokens_mask else []
    return (up_to_end(text, final) if continue_final_message else text), marked


def with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, REASONING[0]: reasoning}


def opened(turns: list[dict[str, Any]]) -> str:
    """Write ``OPEN_END`` behind the last message, in place, and return the text before it.

    Raises ValueError if the message has no text.
    """
    content = turns[-1].get("content")
    if isinstance(content, str):
        turns[-1]["content"] = content + OPEN_END
        return content
    parts = [dict(part) for part in content or ()]
    last = next((part for part in reversed(parts) if "text" in part), None)
    if last is None:
        raise ValueError("continue_final_message is set, and the last message has no text")
    text = str(last["text"])
    last["text"] = text + OPEN_END
    turns[-1]["content"] = parts
    return text


def up_to_end(text: str, final: str) -> str:
    """The rendered text up to the end of its last message, ``final``. Raises ValueError if that is not in it."""
    mark = OPEN_END.strip()
    if final.strip() not in text or mark not in text:
        raise ValueError("continue_final_message is set, and the template does not write the last message as it is")
    end = text.rindex(mark)
    # Where the space behind the mark is gone, the template strips messages.
    return text[:end] if text[end:].startswith(OPEN_END) else text[:end].rstrip()
