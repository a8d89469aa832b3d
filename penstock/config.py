"""Configuration objects: tables of TOML or JSON as checked dataclasses, mistyped names, registries, CLI options."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import math
import os
import re
import reprlib
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, cast

from penstock.core import ConfigError
from penstock.files import NAMED_PIPE, is_named_pipe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)

# ---------------------------------------------------------------------------------------------------------------- typos
# Finds the known name that a mistyped one stands for. A different word is no typo, however similar its letters.

LIKE: Final = 0.75
"""Least ``SequenceMatcher.ratio``, of similar words: ``widht`` is like ``width``, ``store`` not like ``stop``."""
SHORTEST: Final = 3
"""Fewest letters of a word that may be mistyped: ``top_k`` is no ``top_p``."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """The most similar known name of which ``name`` may be a typo or the beginning; None if there is none."""
    found = [one for one in known if is_typo(name, one)]
    return max(found, key=lambda one: likeness(name, one), default=None)


def is_typo(name: str, known: str) -> bool:
    """Whether the names have the same numbers and similar words, or ``name`` is the beginning of ``known``."""
    short, long = sorted((name.lower(), known.lower()), key=len)
    if len(short) >= SHORTEST and long.startswith(short) and short == name.lower():
        return True
    # Other numbers make another name: ``local-3`` is not meant as ``local-4``.
    if re.findall(r"\d+", short) != re.findall(r"\d+", long):
        return False
    if squashed(short) == squashed(long):
        return True
    return all(alike(one, other) for one, other in zip_longest(words_of(short), words_of(long), fillvalue=""))


def alike(one: str, other: str) -> bool:
    """Whether two words of names are equal, or one may be a typo of the other."""
    if one == other:
        return True
    if min(len(one), len(other)) < SHORTEST:
        return False
    # One wrong letter is a typo in a short word, too, whose ratio is below LIKE, unless it is the first letter.
    mistyped = len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1
    return likeness(one, other) >= LIKE or (mistyped and one[0] == other[0])


def likeness(one: str, other: str) -> float:
    """How similar two texts are, from 0 to 1 (``SequenceMatcher.ratio``)."""
    return SequenceMatcher(None, one, other).ratio()


def squashed(name: str) -> str:
    """The name without separators, so that ``top-k`` and ``topk`` are one name."""
    return "".join(words_of(name))


def words_of(name: str) -> list[str]:
    """The words and the numbers of a name, in order; separators are dropped."""
    return re.findall(r"[^\W\d_]+|\d+", name)


# --------------------------------------------------------------------------------------------------------------- config
# Typed configuration: tables read from TOML or JSON become frozen dataclasses, or an error that names the field.
#
# ``parse`` is the entry point. A dataclass checks its values with ``check`` in its own ``__post_init__``, which does
# not know its place in the file; ``parse`` puts the path in front: ``stages[2].layers is 0; it has to be at least 1``.


SCALARS: Final[dict[Any, str]] = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
"""Types of single values, in the words of error messages."""


class FieldError(ConfigError):
    """A field that cannot be used. ``field`` is its full path, ``problem`` what is wrong and what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


def check(holds: bool, field: str, value: object, wanted: str) -> None:
    """Raise FieldError, with what ``field`` has to be, unless ``holds``."""
    if not holds:
        raise FieldError(field, f"is {value!r}; it has to be {wanted}")


def check_writable(name: str, file: Path) -> None:
    """Raise FieldError for a file that cannot be written. A file that is not there is made and removed again."""
    check(file.parent.is_dir() and not file.is_dir(), name, str(file), "a file in a folder that exists")
    place = Path(os.path.realpath(file))
    new = not place.exists()
    try:
        place.open("ab").close()
        if new:
            place.unlink()
    except OSError as error:
        raise FieldError(name, f"is {str(file)!r}, which cannot be written: {error.strerror}") from error


def check_positive(config: DataclassInstance, *names: str, or_zero: bool = False) -> None:
    """Raise FieldError unless each named field is None, or finite and above 0 (``or_zero``: 0 or above)."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            holds = value > 0 or (or_zero and value == 0)
            check(holds, name, value, "0 or above" if or_zero else "above 0")
            check(math.isfinite(value), name, value, "a finite number")


def check_types(config: DataclassInstance) -> None:
    """Convert the fields of a dataclass to the types that they state, in its ``__post_init__``.

    An integer stands for a float, a text for a path and a path for its text. Raises FieldError naming the field whose
    value is of another type.
    """
    for name, hint in hints_of(type(config)).items():
        object.__setattr__(config, name, convert(hint, getattr(config, name), name))


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types that a dataclass's fields state, by name."""
    return typing.get_type_hints(kind)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known name of which it may be a typo, if any, then all names."""
    names = list(known)
    guess = meant(name, names)
    hint = f"did you mean {guess!r}? " if guess is not None else ""
    return f"{hint}Known: {', '.join(names) or 'none'}"


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises ConfigError naming the file, and line and column where it is not TOML."""
    if is_named_pipe(path):
        raise ConfigError(f"{path}: {NAMED_PIPE}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is not TOML: it nests too deep") from error
    except ValueError as error:  # also for bytes that are no UTF-8, and for a number of too many digits
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def parse(kind: type[Config], table: object, where: str = "") -> Config:
    """Make the dataclass ``kind`` from a table; ``where`` is the table's own path, for errors.

    Fields may be str, int, float, bool, Literal, tuple[T, ...], dict[str, T], dataclasses and unions of these; an
    integer stands for a float, nothing else is converted. Raises FieldError for a key that is unknown (with the nearest
    known one), missing, of the wrong type, or refused by the dataclass itself.
    """
    if not isinstance(table, Mapping):
        raise FieldError(where or "configuration", wrong_type(kind, table))
    hints = hints_of(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in table:
        if key not in fields:
            # Unknown keys first: a mistyped name is more helpful than the missing field that it leaves.
            raise FieldError(join(where, str(key)), f"is unknown; {nearest(str(key), fields)}")
    for name, field in fields.items():
        if name not in table and field.default is field.default_factory is dataclasses.MISSING:
            raise FieldError(join(where, name), "is missing")
    values = {key: convert(hints[key], value, join(where, key)) for key, value in table.items()}
    try:
        return kind(**values)
    except FieldError as error:
        # The dataclass names its own field; the table's path goes in front.
        raise FieldError(join(where, error.field), error.problem) from None


def convert(hint: Any, value: Any, where: str) -> Any:
    """Turn one value into the type that ``hint`` states. Raises FieldError, with the path ``where``, if it has not."""
    # A union's alternative is picked by the value's outer shape alone, so that an error within names its own path.
    arm = next((arm for arm in arms(hint) if fits(arm, value)), None)
    if arm is None:
        raise FieldError(where, wrong_type(hint, value))
    origin, arguments = typing.get_origin(arm), typing.get_args(arm)
    if origin is tuple:
        return tuple(convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        return {str(key): convert(arguments[1], item, join(where, str(key))) for key, item in value.items()}
    if origin is Literal:
        return known_name(value, arguments, where)
    if dataclasses.is_dataclass(arm) and isinstance(arm, type):
        return value if isinstance(value, arm) else parse(arm, value, where)
    return arm(value) if arm in (float, Path, str) else value


def arms(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a hint that is no union is its own only alternative."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def known_name(value: object, names: Iterable[str], where: str) -> str:
    """The value, if it is one of the names. Raises FieldError for any other, naming the nearest."""
    known = list(names)
    if not isinstance(value, str):
        raise FieldError(where, f"is {describe(type(value))} ({reprlib.repr(value)}); expected {one_of(known)}")
    if value not in known:
        raise FieldError(where, f"is {value!r}; {nearest(value, known)}")
    return value


def fits(arm: Any, value: object) -> bool:
    """Whether a value has the outer shape of one alternative of a hint."""
    origin = typing.get_origin(arm)
    if origin is tuple:
        return isinstance(value, list | tuple)
    if origin is dict:
        return isinstance(value, Mapping)
    if origin is Literal:
        return isinstance(value, str)
    if dataclasses.is_dataclass(arm) and isinstance(arm, type):
        return isinstance(value, Mapping | arm)
    if arm is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if arm in (str, Path):
        return isinstance(value, str | Path)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping)
    return type(value) is arm  # exact: true is no integer


def wrong_type(hint: Any, value: object) -> str:
    """The end of an error about a value of another type than ``hint``."""
    expected = " or ".join(describe(arm) for arm in arms(hint) if arm is not types.NoneType)
    return f"is {describe(type(value))} ({reprlib.repr(value)}); expected {expected}"


def describe(arm: Any) -> str:
    """A type in plain words, be it a value's or a hint: "a table", "an integer"."""
    origin = typing.get_origin(arm) or arm
    if origin in (tuple, list):
        return "a list"
    if origin is Literal:
        return one_of(typing.get_args(arm))
    if origin in (dict, collections.abc.Mapping) or dataclasses.is_dataclass(origin):
        return "a table"
    if isinstance(origin, type) and issubclass(origin, Path):
        return "a path"
    return SCALARS.get(origin) or ("nothing" if origin is types.NoneType else origin.__name__)


def one_of(names: Iterable[str]) -> str:
    """The names as the end of an error, for example ``one of 'a', 'b'``."""
    return "one of " + ", ".join(map(repr, names))


def join(where: str, key: str) -> str:
    """The path of a key in the table at ``where``, which is empty for the whole file."""
    return f"{where}.{key}" if where else key


# ------------------------------------------------------------------------------------------------------------- registry
# Named variants of one kind, each in a file of its own that is loaded when it is asked for.

Kind = TypeVar("Kind")


class Registry(Mapping[str, type[Kind]], Generic[Kind]):
    """Classes by name. Iteration gives the names and loads no class, so that ``penstock --help`` stays quick.

    ``entries`` state each class as ``"module:Class"``, with the module below ``package``. Raises KeyError for others.
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


# -------------------------------------------------------------------------------------------------------------- options
# ``Option``: how a field of a configuration object appears on the command line.
#
# A dataclass annotates those of its fields that a user can set there::
#
#     dtype: Annotated[str, Option("float32, bfloat16 or float16.", MODEL)] = "float32"
#
# Type, default and help stand there and nowhere else; ``penstock.cli.options`` makes ``--dtype`` of them.

MODEL = "Model"
PIPELINE = "Pipeline"
SPECULATION = "Speculation"
PROMPT = "Prompt"
SAMPLING = "Sampling"
DATA = "Data"
TRAINING = "Training"
SERVER = "Server"
LIMITS = "Limits"
SHARING = "How requests share the engine"
LOAD = "Load"
OUTPUT = "Output"
"""Headings under which ``--help`` lists options."""


@dataclass(frozen=True)
class Option:
    """The command-line option of one field. It may be repeated if the field is a tuple and ``parse`` is None."""

    help: str
    panel: str | None = None
    """The heading under which the help lists it."""
    names: tuple[str, ...] = ()
    """Names on the command line; ``--field-name`` if empty. A bool that is true by default is switched off by them."""
    metavar: str | None = None
    envvar: str | None = None
    default: str | None = None
    """Text that the help shows as the default, where the value itself would say nothing; "" shows none."""
    parse: Callable[[str], Any] | None = None
    """Turns the given text into the field's value. Raises FieldError for a text that stands for none."""
    positional: bool = False
    values: tuple[str, ...] = ()
    """Values that shells complete; in a list with commas, its last entry is completed."""
