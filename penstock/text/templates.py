"""Chat templates, rendered by workers: a template is a program of whoever made the checkpoint, and clients set its
variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from penstock.core import RequestError
from penstock.text.workers import Failed, Job, Overrun, workers

SECONDS: Final = 5.0
"""Processor time for one conversation: usual ones take milliseconds."""


class BrokenTemplate(RequestError):
    """The template is no Jinja, or takes more time or memory than it may: most likely with any other messages, too."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marked: list[list[int]]
    """Where what is marked as the assistant's ({% generation %}) begins and ends in it, if that was asked for."""


def render(given: Mapping[str, Any]) -> Rendered:
    """``given`` are arguments of transformers' ``render_jinja_template``, for one conversation.

    Raises BrokenTemplate, QueueFull where too many of the client's wait, or else RequestError for whatever the template
    does instead, and for what is not JSON.
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
