"""An engine that a person waits for: how far its processes are while they start, and what they then hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console

from penstock.pipeline.loading import LoadingBar
from penstock.pipeline.processes import ProcessHost

Engine = TypeVar("Engine")


@dataclass(frozen=True)
class Start:
    """What starting took, in seconds, and what stages and drafter hold since, in bytes."""

    seconds: float
    weight_bytes: int
    kv_bytes: int


def watched(
    make: Callable[..., Engine], *, transport: str, stage_timeout: float | None, **options: Any
) -> tuple[Engine, Start]:
    """``make``'s engine, once its stages have loaded their layers; a bar on stderr shows how far they are.

    ``make`` is ``LLM`` or ``AsyncLLM``, the rest are its options. Raises what it raises.
    """
    begin = time.monotonic()
    with LoadingBar(Console(stderr=True)) as bar:
        host = ProcessHost(transport, stage_timeout, on_loading=bar)
        try:
            engine = make(host=host, transport=transport, stage_timeout=stage_timeout, **options)
        except BaseException:
            host.close()
            raise
    return engine, Start(time.monotonic() - begin, *bar.held)
