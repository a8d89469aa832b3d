"""Hosts of unequal versions find out before they misunderstand each other: fields of messages change with PROTOCOL."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from penstock import messages
from penstock.hosts import messages as between_hosts
from penstock.hosts.facts import Versions, own_versions
from penstock.hosts.fleet import difference
from penstock.messages import PROTOCOL

SHAPES = {1: "b4c5699d18645fd7"}
"""Protocol -> digest of the fields of all messages. A release's line stays; changed fields get a line of their own."""


def bare(schema: Any) -> Any:
    """A schema without its words, which nobody sends."""
    if isinstance(schema, dict):
        return {name: bare(part) for name, part in sorted(schema.items()) if name != "description"}
    return [bare(part) for part in schema] if isinstance(schema, list) else schema


def test_other_fields_have_another_protocol() -> None:
    told = [bare(msgspec.json.schema(module.Message)) for module in (messages, between_hosts)]
    assert hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16] == SHAPES[PROTOCOL]


@pytest.mark.parametrize(("field", "words"), [("protocol", "protocol"), ("penstock", "Penstock"), ("torch", "torch")])
def test_every_version_that_differs_is_said(field: str, words: str) -> None:
    other = msgspec.structs.replace(own_versions(), **{field: 77 if field == "protocol" else "7.7"})
    assert {one.name for one in msgspec.structs.fields(Versions)} == {"protocol", "penstock", "torch"}
    said = difference("b", own_versions(), other)
    assert said.startswith(f"host b has {words} 7")
    assert said.endswith("; install the same on both")
    assert difference("b", own_versions(), own_versions()) == ""
