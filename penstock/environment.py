"""The surroundings of this process: packages that only some commands need, and API keys."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from penstock.config import FieldError
from penstock.core import ConfigError

# --------------------------------------------------------------------------------------------------------------- extras
# Packages that only some commands need. They are looked for before anything starts; one error names all missing ones.

REQUIREMENT: Final = re.compile(r"([\w.-]+)[^;]*")
"""A requirement up to its marker: the package's name (group 1), then extras and versions."""


@dataclass(frozen=True)
class Need:
    """A package that is needed: ``words`` begin the error ("plots need"), ``extra`` of Penstock installs the package.

    ``command`` installs it where no extra does.
    """

    words: str
    package: str
    extra: str = ""
    command: str = ""


PLOTS: Final = Need("plots need", "matplotlib", "plots")
CURVES: Final = Need("training's curves need", "matplotlib", "train")
RAY: Final = Need("hosts of a Ray cluster need", "ray", "ray")
LAN: Final = Need("finding workers on a network needs", "zeroconf", "lan")
TRAINING_NEED: Final = Need("training needs", "accelerate", "train")
"""The packages that commands ask for with ``require``."""


def require(needs: Iterable[Need]) -> None:
    """Raise ConfigError naming all missing packages and the shell command that installs them.

    One command installs all packages of extras; each other package has a command of its own.
    """
    missing = list(dict.fromkeys(need for need in needs if find_spec(need.package) is None))
    if missing:
        said = " and ".join(f"{need.words} {need.package}" for need in missing)
        of_extras = [need for need in missing if not need.command]
        commands = [install_command(of_extras)] if of_extras else []
        raise ConfigError(f"{said}: {' && '.join([*commands, *(need.command for need in missing if need.command)])}")


def install_command(missing: Iterable[Need]) -> str:
    """The shell command that installs the packages for this Python, whether Penstock is a checkout or a wheel."""
    installer = [sys.executable, "-m", "pip", "install"]
    # An environment that uv made has no pip.
    if find_spec("pip") is None:
        installer = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*installer, *dict.fromkeys(requirement(need) for need in missing)])


def requirement(need: Need) -> str:
    """The package with the versions that Penstock's metadata ask for, for example ``matplotlib>=3.9``."""
    for stated in requires("penstock") or ():
        found = REQUIREMENT.match(stated)
        if found is not None and found[1] == need.package:
            return found[0].strip()
    return need.package


# ------------------------------------------------------------------------------------------------------------- api keys
# API keys: read from a file, checked in the environment, and kept out of child processes.

API_KEY_VARIABLE: Final = "PENSTOCK_API_KEY"
"""The environment variable that holds the server's API key."""


def read_api_keys(file: Path) -> tuple[str, ...]:
    """The keys in a file, one a line. Raises FieldError, naming ``api_key_file``, if it cannot be read or is empty."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise FieldError("api_key_file", f"is {str(file)!r}, which cannot be read: {reason}") from None
    keys = tuple(key for line in lines if (key := line.strip()))
    if not keys:
        raise FieldError("api_key_file", f"is {str(file)!r}, which is empty; it has to hold keys, one a line")
    return keys


def check_api_key_variable(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the variable is set but empty: the server would be open to everybody."""
    if API_KEY_VARIABLE in environment and not environment[API_KEY_VARIABLE].strip():
        raise ConfigError(f"{API_KEY_VARIABLE} is set and holds no key; give it one, or unset it for a server without")


def without_api_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment without the API key, for child processes, which have no use for it."""
    return {name: value for name, value in environment.items() if name != API_KEY_VARIABLE}
