"""Chat templates: rendered by workers, and read for what they do without running them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser

from penstock.core import RequestError
from penstock.text.workers import Failed, Job, Overrun, workers

# ------------------------------------------------------------------------------------------------------------ templates
# Chat templates, rendered by workers: they are programs by a checkpoint's author, with clients' variables.

SECONDS: Final = 5.0
"""Seconds of processor time for one conversation; usual ones take milliseconds."""


class BrokenTemplate(RequestError):
    """The template is no Jinja, or exceeds its time or memory; it would most likely fail with other messages, too."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marked: list[list[int]]
    """The characters [first, last) of each part that {% generation %} marks as the assistant's, if asked for."""


def render(given: Mapping[str, Any]) -> Rendered:
    """Render one conversation; ``given`` are arguments of transformers' ``render_jinja_template``.

    Raises BrokenTemplate, QueueFull where too many of the client's jobs wait, and RequestError where the template
    refuses the messages or ``given`` is not JSON.
    """
    try:
        found = workers().run(Job("render", given, SECONDS))
    except Overrun as overrun:
        problem = f"{overrun.what}; shorten the messages, or change it"
        raise BrokenTemplate(f"messages: the chat template {problem}") from overrun
    except Failed as error:
        raise RequestError(f"messages: the chat template cannot render them ({error.what})") from error
    if "broken" in found:
        raise BrokenTemplate(f"messages: the chat template {found['broken']}")
    if "refused" in found:
        raise RequestError(f"messages: the chat template refuses them: {found['refused']}")
    return Rendered(found["text"], found["marked"])


# ----------------------------------------------------------------------------------------------------- template reading
# Facts about a chat template, read from its syntax tree without running it.
#
# The form of content is told from loops, as in vLLM: a template that loops over a message's content reads a list of
# parts; every other template reads a text.

CONTENT: Final = "content"
"""The field of a message that holds its content."""
IS_TEXT: Final = "string"
"""The test by which a template tells a text from parts."""
CUTTING: Final = frozenset(
    {"split", "rsplit", "find", "rfind", "index", "replace", "startswith", "endswith", "partition", "rpartition"}
    | {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "count"}
)
"""Methods and filters with which a template searches a text for another one."""


class Marked(Extension):
    """transformers' ``{% generation %}``, which marks the assistant's part; it is parsed as its content alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class TemplateFacts:
    """Facts about one template."""

    walks_parts: bool = False
    """Whether the template loops over the parts of a message's content."""
    takes_text: bool = True
    """Whether the template also reads content that is a single text."""
    looked_for: frozenset[str] = frozenset()
    """Texts that the template searches other texts for, or splits them at."""

    def content(self, given: Any) -> Any:
        """A message's content, a text or parts, in the form that the template reads."""
        if self.walks_parts:
            return [{"type": "text", "text": given}] if isinstance(given, str) and not self.takes_text else given
        return given if isinstance(given, str) or given is None else "".join(str(part["text"]) for part in given)


@lru_cache(maxsize=8)
def template_facts(template: str) -> TemplateFacts:
    """The facts about a template in transformers' dialect of Jinja; the defaults where it does not parse."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols", Marked]).parse(template)
    except TemplateError:
        return TemplateFacts()
    names = aliases(tree)
    walked = [loop for loop in tree.find_all(nodes.For) if is_content(loop.iter, names)]
    texts = [test for test in tree.find_all(nodes.Test) if test.name == IS_TEXT and is_content(test.node, names)]
    return TemplateFacts(bool(walked), bool(texts) or not walked, frozenset(looked_for(tree)))


def aliases(tree: nodes.Template) -> frozenset[str]:
    """Names of the template's variables that hold a message's content."""
    assigned = [(one.target, one.node) for one in tree.find_all(nodes.Assign)]
    found: frozenset[str] = frozenset()
    # One pass finds one link of a chain of assignments, so there are as many passes as assignments.
    for _ in assigned:
        more = {target.name for target, node in assigned if isinstance(target, nodes.Name) and is_content(node, found)}
        if more <= found:
            return found
        found |= more
    return found


def is_content(node: nodes.Node, names: Iterable[str]) -> bool:
    """Whether an expression is a message's content, under whatever name the message goes."""
    if isinstance(node, nodes.Filter | nodes.CondExpr):
        inner = [node.node] if isinstance(node, nodes.Filter) else [node.expr1, node.expr2]
        return any(one is not None and is_content(one, names) for one in inner)
    if isinstance(node, nodes.Getattr):
        return node.attr == CONTENT
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == CONTENT
    return isinstance(node, nodes.Name) and node.name in set(names)


def looked_for(tree: nodes.Template) -> Iterator[str]:
    """The constant texts that a template searches for, splits at or strips."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in CUTTING:
            yield from constants(call.args)
    for applied in tree.find_all((nodes.Filter, nodes.Test)):
        if applied.name in CUTTING:
            yield from constants(applied.args)
    for compared in tree.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compared.ops):
            yield from constants([compared.expr])


def constants(expressions: Sequence[nodes.Node]) -> Iterator[str]:
    """The texts among these expressions."""
    return (one.value for one in expressions if isinstance(one, nodes.Const) and isinstance(one.value, str))


def in_its_form(turns: Sequence[Mapping[str, Any]], reading: TemplateFacts) -> list[dict[str, Any]]:
    """The messages, their content in the form that the template reads."""
    return [
        {**turn, CONTENT: reading.content(turn[CONTENT])} if CONTENT in turn and is_told(turn[CONTENT]) else dict(turn)
        for turn in turns
    ]


def is_told(content: Any) -> bool:
    """Whether content is a text or a list of text parts."""
    return isinstance(content, str) or (
        isinstance(content, list)
        and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    )
