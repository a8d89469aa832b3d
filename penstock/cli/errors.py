"""What becomes of an error: one line on stderr, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from penstock.core import ConfigError, PenstockError, RequestError

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn Penstock's errors into one line on stderr, and them and Ctrl-C into exit codes."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except PenstockError as error:
        typer.echo(f"penstock: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | RequestError) else 1) from None
