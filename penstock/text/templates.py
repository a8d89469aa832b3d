"""Chat templates, rendered by workers: they are programs by a checkpoint's author, with clients' variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from penstock.core import RequestError
from penstock.text.workers import Failed, Job, Overrun, workers

SECONDS: Final = 5.0
"""Seconds of processor time for one conversation; usual ones take milliseconds."""


class BrokenTemplate(RequestError):
    """The template is no Jinja, or exceeds its time or memory; it would most likely fail with other messages, too."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marked: list[list[int]]
    """First and last character of each part that {% generation %} marks as the assistant's, if that was asked for."""


def render(given: Mapping[str, Any]) -> Rendered:
    """Render one conversation; ``given`` are arguments of transformers' ``render_jinja_template``.

    Raises BrokenTemplate, QueueFull where too many of the client's jobs wait, and RequestError where the template
    refuses the messages or ``given`` is not JSON.
    """
    try:
        found = workers().run(Job("render", given, SECONDS))
    except Overrun as overrun:
        raise BrokenTemplate(f"the chat template {overrun.what}; shorten the messages, or change it") from overrun
    except Failed as error:
        raise RequestError(f"the chat template cannot be rendered ({error.what})") from error
    if "broken" in found:
        raise BrokenTemplate(f"the chat template {found['broken']}")
    if "refused" in found:
        raise RequestError(f"the chat template refuses these messages: {found['refused']}")
    return Rendered(found["text"], found["marked"])
