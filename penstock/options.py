"""What the command line says about a field of a configuration object.

A dataclass annotates those of its fields that a user can set there::

    dtype: Annotated[str, Option("float32, bfloat16 or float16.", MODEL)] = "float32"

Type, default and help stand there and nowhere else; ``penstock.cli.command`` makes ``--dtype`` of them.
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
    """The option of one field. A field that is a tuple and has no ``parse`` can be given several times."""

    help: str
    panel: str | None = None
    """The heading in the help."""
    names: tuple[str, ...] = ()
    """``--field-name`` where there are none. With names of its own, a bool that is true by default is switched off."""
    metavar: str | None = None
    envvar: str | None = None
    default: str | None = None
    """Words for the default where the value would say nothing; "" shows none."""
    parse: Callable[[str], Any] | None = None
    """Reads the text that is given. Raises FieldError."""
    positional: bool = False
