"""The patterns with which calls are read, over texts of repeated marks: twice the text takes about twice the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from penstock.server.openai.tool_parsers import FENCED, STRUCTURE, XmlParser
from penstock.server.openai.tool_readers import BARE, CHANNEL_NAME, RECIPIENT

READ: Final[dict[str, Callable[[str], Any]]] = {
    "fenced": FENCED.match,
    "bare": BARE.match,
    "xml head": XmlParser.HEAD.match,
    "xml parameter": XmlParser.PARAMETER.match,
    "xml value": XmlParser.VALUE_END.search,
    "xml loose value": XmlParser.LOOSE_END.search,
    "recipient": RECIPIENT.search,
    "channel": CHANNEL_NAME.search,
    "structure": lambda text: sum(1 for _ in STRUCTURE.finditer(text)),
}
"""Each as it is used."""
PIECES: Final = (
    *(" ", "\n", "{ ", '"', "a", "a\n", "\\", "<tool_call> ", "</parameter>", "</parameter> ", "<|channel|> "),
    *("to=functions.", "<function=", "<parameter="),
)


def processor_seconds(read: Callable[[str], Any], text: str) -> float:
    began = time.thread_time()
    read(text)
    return time.thread_time() - began


@pytest.mark.parametrize("name", READ)
def test_time_grows_with_the_text_and_not_with_its_square(name: str) -> None:
    """A square would be 64 times as much for a text that is 8 times as long; half of that is the bound. Too little to
    be measured is no ratio."""
    for before in ("", "x", "</parameter>"):
        for piece in PIECES:
            short, long = (
                min(processor_seconds(READ[name], before + piece * times) for _ in range(3)) for times in (2000, 16000)
            )
            assert long <= 32 * max(short, 1e-4), (before, piece)
