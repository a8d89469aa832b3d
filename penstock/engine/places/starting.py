"""Starts an engine that a person waits for: shows how far its processes are, and the memory that they then hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console

from penstock.engine.options import EngineOptions
from penstock.engine.places.opening import open_host
from penstock.pipeline.loading import LoadingBar, LoadingCount

Engine = TypeVar("Engine")


@dataclass(frozen=True)
class Start:
    """Seconds that the start took, and bytes that stages and drafter hold since."""

    seconds: float
    weight_bytes: int
    kv_bytes: int


def watched(
    make: Callable[..., Engine], options: EngineOptions, loading: LoadingCount | None = None
) -> tuple[Engine, Start]:
    """The engine that ``make`` (``LLM`` or ``AsyncLLM``) returns, once its stages have loaded their layers.

    ``loading`` is told how far they are; None shows a bar on stderr. Raises what ``make`` raises. Objects that are
    alive by then are never garbage-collected, so this is for programs that run the engine and end.
    """
    begin = time.monotonic()
    with loading or LoadingBar(Console(stderr=True)) as bar:
        host = open_host(options, on_loading=bar)
        try:
            engine = make(host=host, **vars(options))
        except BaseException:
            host.close()
            raise
    gc.collect()
    gc.freeze()  # a collection would hold up a token for as long as it takes to look through all that was imported
    return engine, Start(time.monotonic() - begin, *bar.held)
