"""The commands ``penstock keys new`` and ``penstock keys add``."""

from __future__ import annotations

import platform
from pathlib import Path

from penstock.config import check
from penstock.core import ConfigError
from penstock.hosts.enrolment import Enrolment
from penstock.hosts.keys import default_folder, make_cluster


def folder_of(keys: str | None) -> Path:
    return default_folder() if keys is None else Path(keys).expanduser()


def new_cluster(keys: str | None) -> None:
    """Make a new cluster's keys. Raises ConfigError if there are keys already."""
    folder = folder_of(keys)
    make_cluster(folder, platform.node())
    print(f"This host is the first of a new cluster; its keys are in {folder}.")


def add_host(name: str, listen: str, minutes: float, keys: str | None) -> None:
    """Print a token for a new host, and wait for it. Raises ConfigError without an authority, and if it is late."""
    check(minutes > 0, "minutes", minutes, "above 0")
    address = listen if ":" in listen else f"{listen}:0"
    try:
        enrolment = Enrolment(folder_of(keys), name, address)
    except OSError as error:
        raise ConfigError(f"listen: {listen}: {error.strerror}") from error
    with enrolment:
        print(f"On the host that calls itself {name} (`hostname`), within {minutes:g} minutes:\n")
        print(f"  penstock worker --listen ADDRESS:7700 --token {enrolment.token}\n")
        print(f"ADDRESS is that of {name} at which other hosts reach it.", flush=True)  # the wait begins, in a pipe too
        if not enrolment.serve(60 * minutes):
            raise ConfigError(f"keys: {name} has not come within {minutes:g} minutes; its token is void now")
    print(f"{name} has its keys.")
