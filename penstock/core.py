"""Requests, sampling parameters, outputs, finish reasons and the errors that every part raises."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, Final


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """A configuration, checkpoint or argument that cannot work. Raised before anything starts; names the field."""


class RequestError(PenstockError, ValueError):
    """A request that is refused before it starts: bad parameters, or it cannot fit."""


class PipelineError(PenstockError, RuntimeError):
    """A stage or the drafter was lost while requests were running. Names the stage and the cause."""


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API; ``ERROR`` and ``ABORT`` are vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


NUMBERS: Final = ("temperature", "top_p", "min_p")
INTEGERS: Final = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")
OPTIONAL: Final = ("seed", "logprobs")
BIGGEST: Final = 2**31 - 1
"""Above every token id."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when a request ends. Names and meanings are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch a filter off; they apply in
    this order after the temperature: top-k, top-p of what is left, min-p relative to the most probable token.
    ``seed`` None draws one per request. ``logprobs`` k returns the k most probable tokens beside the chosen one, of
    the distribution before temperature and filters. Raises RequestError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", listed("stop", self.stop))
        ids = tuple(whole("stop_token_ids", token) for token in listed("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", ids)
        for name in NUMBERS:
            object.__setattr__(self, name, number(name, getattr(self, name)))
        for name in INTEGERS:
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                object.__setattr__(self, name, whole(name, value))
        checks = [
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or above"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", -1 <= self.top_k <= BIGGEST, "-1 or 0 (off), or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(0 <= token <= BIGGEST for token in ids), "token ids"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "None, or between 0 and 100"),
        ]
        for name, holds, wanted in checks:
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it has to be {wanted}")


def listed(name: str, values: Any) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}; it has to be a list")
    return tuple(values or ())


def whole(name: str, value: Any) -> int:
    """An integer of any library as Python's own: messages to the stages carry no other."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise RequestError(f"{name} is {value!r}; it has to be a whole number") from None


def number(name: str, value: Any) -> float:
    if not isinstance(value, Real):
        raise RequestError(f"{name} is {value!r}; it has to be a number")
    return float(value)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token (natural logarithm) and its rank, 1 being the most probable."""

    logprob: float
    rank: int


@dataclass
class SpeculationMetrics:
    """What speculation did for one request.

    ``drafts`` counts the trees that were drafted, each from its first child to the miss or the last leaf that ends
    it; ``accepted`` the drafted tokens that became certain; ``misses`` the target's tokens that no drafted child of
    the root carried. Rows are nodes that entered the pipeline, prompt included; dead ones were pruned in flight.
    """

    drafts: int = 0
    accepted: int = 0
    misses: int = 0
    drafted_nodes: int = 0
    rows_entered: int = 0
    rows_dead: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens per tree, the target's own included (vLLM's definition)."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def hit_rate(self) -> float:
        """Share of the target's tokens that were among the root's drafted children (PipeDec's accuracy)."""
        results = self.accepted + self.misses
        return self.accepted / results if results else 0.0


@dataclass
class CompletionOutput:
    """One of a request's ``n`` completions."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    first_token_seconds: float | None = None
    seconds: float | None = None


@dataclass
class RequestOutput:
    """A finished (or streamed, so far) request, shaped like vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
