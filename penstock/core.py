"""Requests, sampling parameters, outputs, finish reasons and the errors that every part raises."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
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


NUMBERS: Final = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS: Final = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")
OPTIONAL: Final = ("seed", "logprobs")
BIGGEST: Final = 2**31 - 1
"""Above every token id."""
STRUCTURES: Final = ("json", "json_object", "regex", "choice", "grammar")
LONGEST_STRUCTURE: Final = 65_536
"""Characters. The last stage compiles a grammar between two batches, and everybody waits: a second for one as long."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole output has to be: exactly one of these. Names are vLLM's.

    ``json`` is a JSON schema, as a dict or its text; ``json_object`` asks for any JSON object; ``regex`` is in the
    syntax of Rust's regex crate; ``choice`` lists the possible outputs; ``grammar`` is Lark's or llama.cpp's (GBNF).
    It is at most 65,536 characters long. Raises RequestError naming the field; what a grammar cannot be made of is
    found when the request is checked.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise RequestError(f"structured_outputs has {found}; it has to have exactly one of {', '.join(STRUCTURES)}")
        field, value = f"structured_outputs.{self.kind}", getattr(self, self.kind)
        if self.kind == "json":
            object.__setattr__(self, "json", schema_text(field, value))
        elif self.kind == "json_object" and value is not True:
            raise RequestError(f"{field} is {value!r}; it has to be true or false")
        elif self.kind == "choice":
            choices = listed(field, None if isinstance(value, str) else value)
            object.__setattr__(self, "choice", tuple(unicode_text(field, choice) for choice in choices))
            if not choices:
                raise RequestError(f"{field} is {value!r}; it has to be a list of strings, at least one")
        elif self.kind in ("regex", "grammar"):
            unicode_text(field, value)
        length = 0 if self.kind == "json_object" else len("".join(getattr(self, self.kind)))
        if length > LONGEST_STRUCTURE:
            raise RequestError(f"{field} is {length} characters long; it has to be at most {LONGEST_STRUCTURE}")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in STRUCTURES if getattr(self, name) not in (None, False))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when a request ends. Names and meanings are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch a filter off; they apply in
    this order after the temperature: top-k, top-p of what is left, min-p relative to the most probable token.
    ``seed`` None draws one per request. ``logprobs`` k returns the k most probable tokens beside the chosen one, of
    the distribution before temperature and filters, and before all that follows here.

    ``presence_penalty`` is taken off the logit of every token that the output holds, ``frequency_penalty`` as often as
    it does; ``repetition_penalty`` divides the positive logits of tokens in prompt or output, and multiplies the
    negative ones. ``logit_bias`` is added to the logits of the tokens it names. ``allowed_token_ids`` are the only ones
    that can be picked, EOS among them or not. ``structured_outputs`` says what the whole output has to be; where it is
    complete it ends, even before ``min_tokens``. Raises RequestError naming the field.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", listed("stop", self.stop))
        ids = tuple(whole("stop_token_ids", token) for token in listed("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", ids)
        if self.allowed_token_ids is not None:
            allowed = tuple(whole("allowed_token_ids", i) for i in listed("allowed_token_ids", self.allowed_token_ids))
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", biases("logit_bias", self.logit_bias))
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
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "between 0.001 and 1000; 1 is none"),
            *self._checks_of_tokens(),
        ]
        for name, holds, wanted in checks:
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it has to be {wanted}")
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise RequestError("allowed_token_ids and structured_outputs may leave no token together; give one of them")

    def _checks_of_tokens(self) -> list[tuple[str, bool, str]]:
        bias, allowed, structure = self.logit_bias or {}, self.allowed_token_ids, self.structured_outputs
        known = isinstance(structure, StructuredOutputsParams)
        ids = allowed is None or (bool(allowed) and all(0 <= token <= BIGGEST for token in allowed))
        return [
            ("logit_bias", all(0 <= token <= BIGGEST for token in bias), "token ids and biases"),
            ("logit_bias", all(-100.0 <= value <= 100.0 for value in bias.values()), "biases between -100 and 100"),
            ("allowed_token_ids", ids, "None, or token ids, at least one"),
            ("structured_outputs", structure is None or known, "None, or a StructuredOutputsParams"),
        ]


def schema_text(name: str, schema: Any) -> str:
    """A JSON schema as text. Raises RequestError unless it is a JSON object."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"{name} is {text}; it has to be a JSON schema, which is an object")
    return text


def biases(name: str, given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} is {given!r}; it has to map token ids to biases")
    return {whole(name, token): number(name, value) for token, value in given.items()}


def unicode_text(name: str, value: Any) -> str:
    """A string that is not empty and is Unicode, which JSON can fail to carry (lone surrogates)."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} is {value!r}; it has to be a string, not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: {error}") from None
    return value


def listed(name: str, values: Any) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}; it has to be a list")
    return () if values is None else tuple(values)


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
    it; ``accepted`` the drafted tokens that were committed; ``misses`` the target's tokens that no drafted child of
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
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
