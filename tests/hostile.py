"""Messages with each field at and beyond its bounds, made from the types that the codecs check, not from a list.

Values are what msgpack holds: a struct is a dict, or a list where it is sent as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import inspect

LARGE: Final = (2**31, 2**63 - 1, 2**63, 2**64 - 1)
WORDS: Final = ("", "a\0b", "é" * 300, "c" * 100_000, "x" * 70_000, "../../etc/passwd", "tcp://h:" + "9" * 999)
LONG: Final = (inspect.StrType, inspect.BytesType, inspect.ListType, inspect.VarTupleType, inspect.DictType)
"""Types whose values have a length."""
NESTED: Final[list[Any]] = [[[[[[]]]]]]
EXAMPLES: Final = (
    "tcp://127.0.0.1:9",
    "127.0.0.1:9",
    "127.0.0.1",
    "0" * 64,
    "0" * 40,
    "none",
    "config.json",
    "cpu",
    "",
)
"""Texts among which every pattern in the protocol finds one that it accepts."""


def kinds_of(union: Any) -> list[inspect.StructType]:
    """The messages of a union."""
    found = inspect.type_info(union)
    assert isinstance(found, inspect.UnionType)
    return [kind for kind in found.types if isinstance(kind, inspect.StructType)]


def leaves(kind: inspect.Type, where: str = "") -> Iterator[tuple[str, inspect.Type]]:
    """Every type inside a type, with its place: containers too, since they have a length."""
    yield where, kind
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from leaves(field.type, f"{where or kind.cls.__name__}.{field.name}")
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from leaves(one, where)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from leaves(kind.item_type, f"{where}[]")
    elif isinstance(kind, inspect.TupleType):
        for i, one in enumerate(kind.item_types):
            yield from leaves(one, f"{where}[{i}]")
    elif isinstance(kind, inspect.DictType):
        yield from leaves(kind.key_type, f"{where}{{key}}")
        yield from leaves(kind.value_type, f"{where}{{}}")


def is_bounded(kind: inspect.Type) -> bool:
    """Whether every part of a type has an upper bound that its author chose."""
    if isinstance(kind, inspect.IntType):
        return (kind.ge, kind.gt) != (None, None) and (kind.le, kind.lt) != (None, None)
    if isinstance(kind, inspect.FloatType):  # one bound keeps what is no number out
        return (kind.ge, kind.gt, kind.le, kind.lt) != (None,) * 4
    if isinstance(kind, LONG):
        return kind.max_length is not None
    return isinstance(
        kind, inspect.StructType | inspect.UnionType | inspect.TupleType | inspect.NoneType | inspect.BoolType
    )


def example(kind: inspect.Type) -> Any:
    """A small value that the type takes."""
    if isinstance(kind, inspect.StructType):
        values = {field.encode_name: example(field.type) for field in kind.fields if field.required}
        return whole(kind, values)
    if isinstance(kind, inspect.UnionType):
        return example(kind.types[-1] if isinstance(kind.types[0], inspect.NoneType) else kind.types[0])
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return [example(kind.item_type)] * (kind.min_length or 0)
    if isinstance(kind, inspect.TupleType):
        return [example(one) for one in kind.item_types]
    if isinstance(kind, inspect.StrType):
        return next(text for text in EXAMPLES if takes(kind, text))
    if isinstance(kind, inspect.IntType):
        return math.ceil(kind.ge or 0) if kind.gt is None else math.floor(kind.gt) + 1
    if isinstance(kind, inspect.FloatType):
        return 0.0 if takes(kind, 0.0) else 1.0
    if isinstance(kind, inspect.BytesType):
        return b""
    return {} if isinstance(kind, inspect.DictType) else False if isinstance(kind, inspect.BoolType) else None


def whole(kind: inspect.StructType, values: dict[str, Any]) -> Any:
    """A struct as it is sent, with these values for its fields."""
    if not kind.array_like:
        return {**({kind.tag_field: kind.tag} if kind.tag_field else {}), **values}
    fields = [values.get(field.encode_name, example(field.type)) for field in kind.fields]
    return [kind.tag, *fields] if kind.tag_field else fields


def takes(kind: inspect.FloatType | inspect.StrType, value: Any) -> bool:
    """Whether the codec takes a number or a text for a type."""
    limits = {
        name: getattr(kind, name)
        for name in ("ge", "gt", "le", "lt", "max_length", "min_length", "pattern")
        if getattr(kind, name, None) is not None
    }
    plain: Any = float if isinstance(kind, inspect.FloatType) else str
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Annotated[plain, msgspec.Meta(**limits)])
    except msgspec.MsgspecError:
        return False
    return True


def odd(kind: inspect.Type) -> Iterator[Any]:
    """Values at and beyond a type's bounds, and of other types; ``refused`` tells which are invalid."""
    if isinstance(kind, inspect.IntType):
        edges = [int(edge) for edge in (kind.ge, kind.gt, kind.le, kind.lt) if edge is not None]
        near = {edge + step for edge in edges for step in (-1, 0, 1)}
        yield from (one for one in (*near, -1, *LARGE, -(2**63)) if -(2**63) <= one < 2**64)
        yield from (1.5, "1", None, [])
    elif isinstance(kind, inspect.FloatType):
        yield from (float("nan"), float("inf"), -float("inf"), -1.0, 1e308, -1e308, "1", None)
    elif isinstance(kind, inspect.StrType):
        yield from WORDS
        yield from ("x" * ((kind.max_length or 0) + step) for step in (-1, 0, 1))
        yield from (7, None, b"\xff")
    elif isinstance(kind, inspect.BytesType):
        yield from (b"\0" * 100, bytes((kind.max_length or 0) + 1), "x", None)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        few = min(kind.max_length or 0, 5000)
        yield from ([example(kind.item_type)] * few, [None] * ((kind.max_length or 0) + 1), None, {}, NESTED)
        yield from ([one] for one in odd(kind.item_type))
    elif isinstance(kind, inspect.TupleType):
        good = example(kind)
        for i, one in enumerate(kind.item_types):
            yield from ([*good[:i], value, *good[i + 1 :]] for value in odd(one))
        yield from (good[:-1], [*good, 0], None)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from odd(one)
    elif isinstance(kind, inspect.StructType):
        yield from odd_structs(kind)
        yield from (None, 7, [], NESTED)
    elif isinstance(kind, inspect.DictType):
        yield from ({}, None, [], {"x": 1})
    elif isinstance(kind, inspect.BoolType):
        yield from (2, "yes", None)


def odd_structs(kind: inspect.StructType) -> Iterator[Any]:
    """Yield a struct with one field at a time at and beyond its bounds."""
    required = {field.encode_name: example(field.type) for field in kind.fields if field.required}
    for field in kind.fields:
        for value in odd(field.type):
            yield whole(kind, {**required, field.encode_name: value})


def fits(kind: inspect.StructType, value: Any) -> bool:
    """Whether the codec takes the message."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind.cls)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True
