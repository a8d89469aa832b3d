"""Packages that only some commands need. They are looked for before anything starts; one error names all missing."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import requires
from importlib.util import find_spec
from typing import Final

from penstock.core import ConfigError

REQUIREMENT: Final = re.compile(r"([\w.-]+)[^;]*")
"""A requirement up to its marker: the package's name (group 1), then extras and versions."""


@dataclass(frozen=True)
class Need:
    """A package, the Penstock extra that installs it, and the ``words`` that begin the error: "plots need".

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


def require(needs: Iterable[Need]) -> None:
    """Raise ConfigError naming all that is missing, and the command that installs it, with one more for each package
    that no extra has."""
    missing = list(dict.fromkeys(need for need in needs if find_spec(need.package) is None))
    if missing:
        said = " and ".join(f"{need.words} {need.package}" for need in missing)
        of_extras = [need for need in missing if not need.command]
        commands = [install_command(of_extras)] if of_extras else []
        raise ConfigError(f"{said}: {' && '.join([*commands, *(need.command for need in missing if need.command)])}")


def install_command(missing: Iterable[Need]) -> str:
    """The shell command that installs the packages for this Python, whether Penstock is a checkout or a wheel."""
    installer = [sys.executable, "-m", "pip", "install"]
    # An environment that uv has made has no pip.
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
