"""The options of ``penstock bench serve``, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from penstock.bench.options import FiguresFile
from penstock.clients.api import ServedModel, Server
from penstock.config import FieldError, check, nearest
from penstock.options import LOAD, OUTPUT, SAMPLING, SERVER, Option

PATHS: Final = {"completions": "/completions", "chat": "/chat/completions"}
"""Paths below the server's address, by endpoint."""
RANDOM: Final = Path("random")
LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency: vLLM's names."""
DEFAULT_INPUT: Final = 128
"""Default number of tokens of a random prompt."""
BOUNDED: Final = ("ttft", "tpot", "e2el")
"""Latencies of which a request has one value each, so that they can be limited."""


def parse_concurrency(text: str) -> tuple[int, ...]:
    """The numbers in ``1,2,4``. Raises FieldError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise FieldError("concurrency", f"is {text!r}; it has to be whole numbers with commas between") from error


def parse_goodput(text: str) -> dict[str, float]:
    """The limits in ``ttft:500,tpot:50``: milliseconds by latency. Raises FieldError."""
    limits = {}
    for part in text.split(","):
        name, _, limit = part.strip().partition(":")
        if name not in BOUNDED:
            raise FieldError("goodput", f"names {name!r}; {nearest(name, BOUNDED)}")
        try:
            limits[name] = float(limit)
        except ValueError as error:
            raise FieldError("goodput", f"is {part!r}; it has to be like {name}:500, in milliseconds") from error
    return limits


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The server, its load, and the figures. Raises FieldError."""

    server: Server = field(default_factory=Server)
    model: ServedModel = None
    endpoint: Annotated[str, Option("completions or chat.", SERVER)] = "completions"
    request_rate: Annotated[float, Option("Requests that arrive per second; inf: all at once.", LOAD)] = math.inf
    burstiness: Annotated[float, Option("1 is a Poisson process; below, requests come in bursts.", LOAD)] = 1.0
    concurrency: Annotated[
        tuple[int, ...],
        Option(
            "Most requests at a time; several are measured one after the other.",
            LOAD,
            metavar="K,K,...",
            default="no limit",
            parse=parse_concurrency,
        ),
    ] = ()
    num_prompts: Annotated[int, Option("Requests for each concurrency.", LOAD)] = 100
    num_warmups: Annotated[int, Option("Requests before them that do not count.", LOAD)] = 1
    dataset: Annotated[
        Path,
        Option(
            "Random words, or one JSON object a line with 'prompt' or 'turns'.",
            SAMPLING,
            metavar="random|FILE.jsonl",
        ),
    ] = RANDOM
    input_len: Annotated[
        int | None,
        Option("Tokens of a random prompt, on average and as the server counts.", SAMPLING, default=str(DEFAULT_INPUT)),
    ] = None
    output_len: Annotated[int, Option("Most tokens per request.", SAMPLING)] = 128
    temperature: Annotated[float, Option("0 is greedy.", SAMPLING)] = 0.0
    seed: Annotated[int, Option("The first request's, the next one has the next; arrivals too.", SAMPLING)] = 0
    ignore_eos: Annotated[bool, Option("Have output-len tokens of every request.", SAMPLING)] = False
    goodput: Annotated[
        Mapping[str, float],
        Option(
            "Count the requests per second that keep these limits.",
            OUTPUT,
            metavar="ttft:MS,tpot:MS,e2el:MS",
            default="",
            parse=parse_goodput,
        ),
    ] = field(default_factory=dict)
    json: FiguresFile = None
    plot: Annotated[
        Path | None,
        Option("Draw throughput and latencies over concurrency.", OUTPUT, metavar="FILE.png", default=""),
    ] = None

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
        if self.dataset != RANDOM and self.input_len is not None:
            raise FieldError("input_len", "is the length of random prompts, but the dataset is a file; remove one")
        for name in ("json", "plot"):
            file: Path | None = getattr(self, name)
            check(file is None or file.parent.is_dir(), name, str(file), "in a folder that exists")
        if self.plot is not None:
            check(len(self.concurrency) > 1, "concurrency", self.concurrency, "several, to be compared in a plot")
