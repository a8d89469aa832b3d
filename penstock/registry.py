"""Named variants of one kind, each in a file of its own that is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

Kind = TypeVar("Kind")


class Registry(Mapping[str, type[Kind]], Generic[Kind]):
    """Classes by name. Iterating over the names loads no class, so that ``penstock --help`` stays quick.

    ``entries`` says where each class is: ``"module:Class"``, the module below ``package``.
    """

    def __init__(self, package: str, entries: Mapping[str, str]) -> None:
        self._package = package
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> type[Kind]:
        module, _, attribute = self._entries[name].partition(":")
        return cast("type[Kind]", getattr(importlib.import_module(f"{self._package}.{module}"), attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
