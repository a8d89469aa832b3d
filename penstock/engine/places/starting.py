"""Starts an engine that a person waits for: shows how far its processes are, and the memory that they then hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from penstock.engine.options import EngineOptions
from penstock.engine.places.opening import open_host
from penstock.pipeline.loading import LoadingBar, LoadingCount

if TYPE_CHECKING:
    from penstock.engine.resolve import Resolved

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


def loaded(setup: Resolved, start: Start, numerics: str) -> str:
    """A loaded model in a line, as ``30 layers in int4, exact numerics, 2 stages · 97 MB of weights, ...``.

    ``numerics`` is ``LLM.numerics``.
    """
    form = setup.options.dtype if setup.quantization == "none" else setup.quantization
    weights, room = (f"{held / 1e6:,.0f} MB" for held in (start.weight_bytes, start.kv_bytes))
    parts = [
        f"{setup.checkpoint.num_layers} layers in {form}, {numerics} numerics, "
        f"{setup.stages} stage{'s' * (setup.stages != 1)}",
        f"{weights} of weights, {room} for {setup.capacity:,} tokens",
        f"loaded in {start.seconds:.1f} s",
    ]
    return " · ".join(parts)
