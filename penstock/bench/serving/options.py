"""What ``penstock bench serve`` is told, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.bench.plots import require_matplotlib
from penstock.clients.api import Server
from penstock.config import FieldError, check, nearest

PATHS: Final = {"completions": "/completions", "chat": "/chat/completions"}
"""By endpoint, below the server's address."""
RANDOM: Final = "random"
LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency: vLLM's names."""
BOUNDED: Final = ("ttft", "tpot", "e2el")
"""Those that a request has one of each."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """``concurrency`` empty: no limit. ``dataset`` None: random prompts. ``goodput``: milliseconds by latency."""

    server: Server = field(default_factory=Server)
    model: str | None = None
    endpoint: str = "completions"
    request_rate: float = math.inf
    """Requests per second; inf sends all at once."""
    burstiness: float = 1.0
    concurrency: tuple[int, ...] = ()
    num_prompts: int = 100
    num_warmups: int = 1
    dataset: Path | None = None
    input_len: int | None = None
    output_len: int = 128
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False
    goodput: Mapping[str, float] = field(default_factory=dict)
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        check(self.endpoint in PATHS, "endpoint", self.endpoint, " or ".join(PATHS))
        check(self.request_rate > 0, "request_rate", self.request_rate, "above 0, or inf")
        check(0 < self.burstiness < math.inf, "burstiness", self.burstiness, "above 0")
        check(all(limit >= 1 for limit in self.concurrency), "concurrency", self.concurrency, "at least 1")
        different = len(set(self.concurrency)) == len(self.concurrency)
        check(different, "concurrency", self.concurrency, "different numbers")
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.num_warmups >= 0, "num_warmups", self.num_warmups, "0 or above")
        check(self.input_len is None or self.input_len >= 1, "input_len", self.input_len, "at least 1")
        check(self.output_len >= 1, "output_len", self.output_len, "at least 1")
        check(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or above")
        if self.dataset is not None and self.input_len is not None:
            raise FieldError("input_len", "is the length of random prompts, but the dataset is a file; remove one")
        for name in ("json", "plot"):
            file: Path | None = getattr(self, name)
            check(file is None or file.parent.is_dir(), name, str(file), "in a folder that exists")
        if self.plot is not None:
            require_matplotlib()
            check(len(self.concurrency) > 1, "concurrency", self.concurrency, "several, to be compared in a plot")


def parse_concurrency(text: str | None) -> tuple[int, ...]:
    """``1,2,4``. Raises FieldError for what is no number."""
    try:
        return tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError as error:
        raise FieldError("concurrency", f"is {text!r}; it has to be whole numbers with commas between") from error


def parse_goodput(text: str | None) -> dict[str, float]:
    """``ttft:500,tpot:50``: milliseconds by latency. Raises FieldError."""
    limits = {}
    for part in text.split(",") if text is not None else ():
        name, _, limit = part.strip().partition(":")
        if name not in BOUNDED:
            raise FieldError("goodput", f"names {name!r}; {nearest(name, BOUNDED)}")
        try:
            limits[name] = float(limit)
        except ValueError as error:
            raise FieldError("goodput", f"is {part!r}; it has to be like {name}:500, in milliseconds") from error
    return limits
