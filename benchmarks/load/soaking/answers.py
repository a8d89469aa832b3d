"""Compares a reply with the only right answer of its case."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.load.soaking.cases import Case, Choice
from benchmarks.load.soaking.wire import Reply


def problem_of(case: Case, reply: Reply, stream: bool) -> str | None:
    """The problem of a reply of status 200; None if it is right."""
    try:
        choices = streamed(reply.body) if stream else whole(reply.json())
    except (ValueError, KeyError, AssertionError) as error:
        return f"cannot be read: {error!r}: {reply.body[-300:]!r}"
    if len(choices) != len(case.choices):
        return f"{len(choices)} choices of {len(case.choices)}"
    for index, (found, wanted) in enumerate(zip(choices, case.choices, strict=True)):
        if found != wanted:
            return f"choice {index} is {found}, alone it is {wanted}"
    return None


def whole(body: dict[str, Any]) -> list[Choice]:
    return [
        Choice(one["token_ids"], one["text"] if "text" in one else one["message"]["content"], one["finish_reason"])
        for one in body["choices"]
    ]


def streamed(body: bytes) -> list[Choice]:
    """The choices that the events make together. Raises AssertionError unless each of them ends once."""
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), "the stream does not end with [DONE]"
    return joined(json.loads(event.removeprefix("data: ")) for event in events)


def joined(chunks: Iterable[dict[str, Any]]) -> list[Choice]:
    found: dict[int, Choice] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for piece in chunk["choices"]:
            before = found.get(piece["index"], Choice([], "", ""))
            assert not before.finish_reason, f"choice {piece['index']} goes on behind its end"
            text = piece["text"] if "text" in piece else piece["delta"].get("content") or ""
            ids = before.token_ids + piece.get("token_ids", [])  # the first chunk of a chat has none
            found[piece["index"]] = Choice(ids, before.text + text, piece["finish_reason"] or "")
    assert all(choice.finish_reason for choice in found.values()), "a choice has no end"
    return [found[index] for index in sorted(found)]
