"""An engine that a person waits for: how far its processes are while they start, and what they then hold."""

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
    """What starting took, in seconds, and what stages and drafter hold since, in bytes."""

    seconds: float
    weight_bytes: int
    kv_bytes: int


def watched(
    make: Callable[..., Engine], options: EngineOptions, loading: LoadingCount | None = None
) -> tuple[Engine, Start]:
    """``make``'s engine, once its stages have loaded their layers. ``loading`` hears how far they are.

    It is a bar on stderr where it is None. ``make`` is ``LLM`` or ``AsyncLLM``. Raises what it raises. No garbage among
    what is alive by then is collected later: for programs that run the engine and end.
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
