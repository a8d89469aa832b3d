"""Errors on the command line: one line on stderr, and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer

from penstock.core import ConfigError, PenstockError, RequestError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
AGAIN_S: Final = 0.05
"""Seconds after which a Ctrl-C that Python dropped is sent again."""


@contextmanager
def reported() -> Iterator[None]:
    """A context that reports Penstock's errors in one line on stderr, and turns them and Ctrl-C into exit codes."""
    hook, sys.unraisablehook = sys.unraisablehook, interrupt_again
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except PenstockError as error:
        typer.echo(f"penstock: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | RequestError) else 1) from None
    finally:
        sys.unraisablehook = hook


def interrupt_again(dropped: UnraisableHookArgs) -> None:
    """Send Ctrl-C again if Python dropped it: errors raised while an object is deleted go to this hook and are lost."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)
