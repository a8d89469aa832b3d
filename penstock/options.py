"""``Option``: how a field of a configuration object appears on the command line.

A dataclass annotates those of its fields that a user can set there::

    dtype: Annotated[str, Option("float32, bfloat16 or float16.", MODEL)] = "float32"

Type, default and help stand there and nowhere else; ``penstock.cli.options`` makes ``--dtype`` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Option:
    """The command-line option of one field. It may be given several times if the field is a tuple without ``parse``."""

    help: str
    panel: str | None = None
    """The heading under which the help lists it."""
    names: tuple[str, ...] = ()
    """Names on the command line; ``--field-name`` if empty. A bool that is true by default is switched off by them."""
    metavar: str | None = None
    envvar: str | None = None
    default: str | None = None
    """Words that the help shows as the default, where the value itself would say nothing; "" shows none."""
    parse: Callable[[str], Any] | None = None
    """Turns the given text into the field's value. Raises FieldError."""
    positional: bool = False
    values: tuple[str, ...] = ()
    """Values that shells complete; of a list with commas, its last entry's."""
