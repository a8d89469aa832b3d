"""API keys: read from a file, checked in the environment, and kept out of child processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.config import FieldError
from penstock.core import ConfigError

API_KEY_VARIABLE: Final = "PENSTOCK_API_KEY"


def read_api_keys(file: Path) -> tuple[str, ...]:
    """The keys in a file, one a line. Raises FieldError, naming ``api_key_file``, for a file that holds none."""
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
    """Raise ConfigError where the variable is set but empty: the server would be open to everybody."""
    if API_KEY_VARIABLE in environment and not environment[API_KEY_VARIABLE].strip():
        raise ConfigError(f"{API_KEY_VARIABLE} is set and holds no key; give it one, or unset it for a server without")


def without_api_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment without the API key, for child processes, which have no use for it."""
    return {name: value for name, value in environment.items() if name != API_KEY_VARIABLE}
