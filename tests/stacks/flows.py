"""The flows that every Python stack runs in its own environment; each prints its result as one line of JSON."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

BASE, BUSY, MODEL = sys.argv[1:4]
"""The API's address, that of a server where hardly anybody may wait, and the model's name."""
KEY = "none"
QUESTION = "What is the weather?"
PATIENCE = 120.0
ENOUGH = 300
"""Tokens in which every structured answer of these flows ends."""
TOO_LONG = "wheel " * 9000

PLACE = {"type": "string", "enum": ["Oslo", "Rome"]}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "days": DAYS},
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
}
LEAF = {"type": "null"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "$defs": WEATHER,
    "definitions": {
        "type": "object",
        "properties": {"p": {"$ref": "#/definitions/P"}},
        "required": ["p"],
        "additionalProperties": False,
        "definitions": {"P": PLACE},
    },
    "recursive": {
        "type": "object",
        "properties": {"v": DAYS, "next": {"anyOf": [LEAF, {"$ref": "#"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    },
}


NODES = re.compile(r'(\{\s*"v"\s*:\s*[1-9]\s*,\s*"next"\s*:\s*)+[\s\S]{0,40}')


def is_of(name: str, text: str) -> bool:
    """Whether a text is of the schema of this name, or was cut off within it: nothing makes a model end its nodes."""
    try:
        return fits(name, json.loads(text))
    except ValueError:
        return name == "recursive" and NODES.fullmatch(text) is not None


def fits(name: str, value: Any) -> bool:
    """Whether a value fits the schema of this name."""
    if name == "$defs":
        return set(value) == {"place", "days"} and value["place"] in PLACE["enum"] and 1 <= value["days"] <= 9
    if name == "definitions":
        return set(value) == {"p"} and value["p"] in PLACE["enum"]
    return set(value) == {"v", "next"} and (value["next"] is None or fits(name, value["next"]))


def run(stack: str, packages: list[str], flows: list[Callable[[], Any]]) -> None:
    """Try each flow, in order. A flow that raises has failed; the others are tried all the same."""
    print(json.dumps({"stack": stack, "versions": {name: version(name) for name in packages}}), flush=True)
    for flow in flows:
        problem = ""
        try:
            if inspect.iscoroutinefunction(flow):
                asyncio.run(asyncio.wait_for(flow(), PATIENCE))
            else:
                flow()
        except BaseException:
            problem = traceback.format_exc()
        print(json.dumps({"flow": flow.__name__, "problem": problem}), flush=True)
