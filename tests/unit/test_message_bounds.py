"""Every field of every message between processes has bounds; what is beyond them is malformed, nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from penstock import messages
from penstock.hosts import messages as control
from penstock.hosts import probe as probes
from penstock.hosts.weights import FilePart
from penstock.messages import MalformedMessage
from penstock.pipeline.base import StageSpec
from tests.hostile import example, fits, is_bounded, kinds_of, leaves, odd_structs

SESSION = "5" * 32
UNBOUNDED = ("Batch.opened[].sampling.seed", "Batch.opened[].sampling.sample")
"""msgpack holds no more than these may be."""
STAGES = kinds_of(messages.Message)
CONTROL = kinds_of(control.Message)
PROBES = kinds_of(probes.ProbeMessage)
REJOINED = inspect.type_info(StageSpec)


def names(kinds: list[inspect.StructType]) -> list[str]:
    return [kind.cls.__name__ for kind in kinds]


@pytest.mark.parametrize("kind", [*STAGES, *CONTROL, *PROBES, REJOINED], ids=lambda kind: kind.cls.__name__)
def test_every_field_has_bounds(kind: inspect.StructType) -> None:
    unbounded = [where for where, one in leaves(kind) if not is_bounded(one)]
    assert [where for where in unbounded if where not in UNBOUNDED] == []


def of_stages(value: Any, contents: list[bytes]) -> object:
    header = messages.opening(SESSION) + msgspec.msgpack.encode(value)
    return messages.decode([header, *contents], SESSION)


def of_hosts(value: Any, contents: list[bytes]) -> object:
    _, raw = control.lease_of([msgspec.msgpack.encode(("lease", value))])
    return control.decode(raw, contents)


def of_probes(value: Any, contents: list[bytes]) -> object:
    return probes.message_of([msgspec.msgpack.encode((SESSION, value)), *contents], SESSION)


CASES = [
    *((of_stages, kind) for kind in STAGES),
    *((of_hosts, kind) for kind in CONTROL),
    *((of_probes, kind) for kind in PROBES),
]


@pytest.mark.parametrize(("decode", "kind"), CASES, ids=lambda one: getattr(getattr(one, "cls", None), "__name__", ""))
def test_what_is_beyond_a_bound_is_malformed(decode: Any, kind: inspect.StructType) -> None:
    contents = [b""] if kind.cls in control.WITH_CONTENT else []
    refused = 0
    for value in odd_structs(kind):
        if fits(kind, value):
            try:
                decode(value, contents)  # what fits each field may still contradict itself
            except MalformedMessage:
                refused += 1
            continue
        refused += 1
        with pytest.raises(MalformedMessage):
            decode(value, contents)
    assert refused or not kind.fields
    assert fits(kind, example(kind))


def test_a_message_with_a_frame_too_many_or_too_few_is_malformed() -> None:
    for kind in CONTROL:
        wanted = kind.cls in control.WITH_CONTENT
        for contents in ([], [b""], [b"", b""]):
            if len(contents) != wanted:
                with pytest.raises(MalformedMessage, match="frames behind its header"):
                    of_hosts(example(kind), contents)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "x" * 256, "../../.ssh/authorized_keys", 7, None]
)
def test_a_file_is_named_plainly(name: object) -> None:
    part = {"name": name, "size": 1, "root": "0" * 64, "pieces": []}
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=FilePart)


@pytest.mark.parametrize(
    "host", ["localhost", "256.1.1.1", "h:1", "", "127.0.0.1\n", "1.2.3.4 ", "9" * 100_000, "[::1"]
)
def test_an_address_is_in_numbers(host: str) -> None:
    joins, attaches = {"type": "join", "host": f"{host}:9"}, {"type": "attach", "head": f"tcp://{host}:9", "host": host}
    for message in (joins, attaches):
        with pytest.raises(MalformedMessage):
            of_hosts(message, [])
