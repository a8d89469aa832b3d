"""Requests, sampling parameters, outputs, finish reasons and the errors that every part raises."""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from numbers import Real
from typing import Any, Final, Self

__version__ = "0.1.0"

SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Matches half of a surrogate pair. JSON can carry one alone, UTF-8 cannot, and no tokenizer reads it."""
NO_HOST: Final = "this is no name of a host"
"""The end of an error about a name that cannot even be looked up."""
MOST_RANKS: Final = 64
"""Upper limit of a stage's ranks. It bounds a list that is decoded from a message."""
MOST_THREADS: Final = 1024
"""Upper limit of a stage's threads. The largest hosts have a few hundred cores."""


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose. Its text says what is wrong and what to do.

    ```python
    from penstock import LLM, PenstockError

    try:
        LLM("demo", pipeline_parallel_size=40)
    except PenstockError as error:
        print(error)  # pipeline_parallel_size is 40; the model has 16 layers, and a stage needs one at least
    ```
    """


class ConfigError(PenstockError, ValueError):
    """An option, checkpoint or cluster that cannot work. Raised before anything starts; names the field.

    ```python
    from penstock import LLM, ConfigError

    try:
        LLM("no/such/folder")
    except ConfigError as error:
        print(error)
    ```
    """


class RequestError(PenstockError, ValueError):
    """A request that is refused before it starts: its parameters are wrong, or it is too long. Names the field.

    It is also raised for a request that could not go on: its grammar was exhausted, or led where no token is possible.

    ```python
    from penstock import RequestError, SamplingParams

    try:
        SamplingParams(top_p=2)
    except RequestError as error:
        print(error)  # top_p is 2.0; it has to be above 0, at most 1
    ```
    """


class QueueFull(RequestError):
    """``max_queue`` requests are waiting for an ``AsyncLLM`` or ``Replicas`` already. Try again later.

    ``AsyncLLM.submit`` has an example.
    """


class Recovering(QueueFull):
    """The queue is full, and the engine is replacing a stage that was lost. Try again later."""


class PipelineError(PenstockError, RuntimeError):
    """A stage was lost and could not be replaced in time, or the engine is closed. Names the stage and the cause.

    Every request that was under way is lost with it, and the engine takes no more: make a new one.
    ``LLM.stream`` has an example.
    """


class PipelineLost(PipelineError):
    """A stage or the drafter was lost while the engine ran. The engine recovers from it where it may and can."""


class CheckpointChanged(PipelineError):
    """A file of the model has changed since the engine started, and would now give other tokens."""


class FinishReason(StrEnum):
    """Why a completion ended, in the words of the OpenAI API; ``ABORT`` and ``ERROR`` are vLLM's.

    It is a string:

    ```python
    from penstock import FinishReason

    print(FinishReason.STOP == "stop", FinishReason("length").name)
    ```
    """

    STOP = "stop"
    """The model's EOS token, a stop token or string, or a structured output that is complete."""
    LENGTH = "length"
    """``max_tokens`` was reached."""
    ABORT = "abort"
    """The caller ended it, or closed the engine."""
    ERROR = "error"
    """A structured output could not go on, or a stage or the drafter was lost."""


BIGGEST: Final = 2**31 - 1
"""Largest token id, and largest ``top_k``, that a message to the stages can carry (``messages.MOST``)."""
OUTLINE_MODES: Final = ("off", "auto", "on")
"""Values of ``outline_decoding``."""
STRUCTURES: Final = ("json", "json_object", "regex", "choice", "grammar")
"""Fields of ``StructuredOutputsParams``, exactly one of which is given."""
LONGEST_STRUCTURE: Final = 65_536
"""Most characters of a structure. One of this length takes up to 0.1 s to compile, while other work goes on."""


class Named:
    """A dataclass whose constructor raises RequestError for an unknown field, naming the nearest known one."""

    def __new__(cls, *_: object, **given: object) -> Self:
        # Checked before __init__, whose TypeError would not name the nearest field.
        known = getattr(cls, "__dataclass_fields__", {})
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known)}"
                raise RequestError(f"{name} is not a field of {cls.__name__}; {hint}")
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(Named):
    """The form that the whole output has to have: exactly one of these fields is given. Names are vLLM's.

    Its value is at most 65,536 characters long, all strings of ``choice`` together. The constructor raises
    RequestError, naming the field, for none or several fields and for a value that cannot be used. Submitting the
    request raises it where no grammar can be made of the value, and where the model lacks a tokenizer or an EOS token.

    ```python
    from penstock import SamplingParams, StructuredOutputsParams

    number = StructuredOutputsParams(regex="-?[0-9]+")
    answer = StructuredOutputsParams(json={"type": "object", "properties": {"year": {"type": "integer"}}})
    print(SamplingParams(structured_outputs=number, max_tokens=8).structured_outputs.kind, answer.kind)
    ```
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema that is an object, as a dict or as its text."""
    json_object: bool = False
    """True for any JSON object."""
    regex: str | None = None
    """A regular expression that the whole output matches, in the syntax of Rust's regex crate."""
    choice: list[str] | tuple[str, ...] | None = None
    """Strings of which the output is one; at least one, and none empty."""
    grammar: str | None = None
    """A context-free grammar, in Lark's or in llama.cpp's (GBNF) notation."""

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
class SamplingParams(Named):
    """How the next token is chosen, and when a request ends. Names and meanings are vLLM's.

    The same seed gives the same tokens, whatever the strategy, the drafter, the number of stages and the requests
    beside it. The filters apply after the temperature, in this order: top-k (Fan et al., 2018), top-p of what is left
    (Holtzman et al., 2020) and min-p (Nguyen et al., 2024). The constructor raises RequestError, naming the field, for
    an unknown one, a value of another type, and a value out of the range that the field states.

    ```python
    from dataclasses import replace

    from penstock import SamplingParams

    chat = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=256, stop=["Question:"])
    print(replace(chat, seed=7, n=4))
    ```
    """

    n: int = 1
    """Completions of the prompt, at least 1, each with noise of its own derived from ``seed``."""
    temperature: float = 1.0
    """The logits are divided by it, 0 or above; 0 is greedy."""
    top_p: float = 1.0
    """Only the most probable tokens that together have this probability, above 0; 1 is off."""
    top_k: int = 0
    """Only this many of the most probable tokens, at most 2**31 - 1; 0 or -1 is off."""
    min_p: float = 0.0
    """Only tokens with at least this fraction, 0 to 1, of the most probable one's probability; 0 is off."""
    seed: int | None = None
    """Seed of the sampling noise, 0 to 2**63 - 1; None draws one for each request."""
    stop: str | list[str] | tuple[str, ...] = ()
    """The output ends where one of these strings appears, none of which is empty. They need a tokenizer."""
    stop_token_ids: list[int] | tuple[int, ...] = ()
    """The output ends with the first of these tokens."""
    include_stop_str_in_output: bool = False
    """Whether ``text`` holds the stop string that ended it."""
    max_tokens: int = 16
    """Most tokens that the output may have, at least 1; with the prompt at most ``max_model_len`` and ``kv_slots``."""
    min_tokens: int = 0
    """EOS, stop tokens and stop strings do not end an output with fewer tokens; at most ``max_tokens``."""
    ignore_eos: bool = False
    """Whether the output goes on after the checkpoint's own EOS tokens."""
    logprobs: int | None = None
    """Return the log-probability of each token, and of this many of the most probable ones beside it, 0 to 100; None
    returns none. They are of the model's own distribution: before temperature, filters, penalties and biases."""
    skip_special_tokens: bool = True
    """Whether ``text`` leaves out the tokenizer's special tokens."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output holds, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for every time that the output holds it, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt or output, and multiplies the negative ones, 0.001 to 1000; 1 is
    off (Keskar et al., CTRL, 2019, section 4.1)."""
    logit_bias: dict[int, float] | None = None
    """Token ids, and what is added to their logits, -100 to 100."""
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    """The only tokens that can be picked, at least one. EOS is one of them or is never picked. Not together with
    ``structured_outputs``."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the whole output has to have; it ends once it is complete, even before ``min_tokens``."""

    def __post_init__(self) -> None:
        # A string is iterable, too: it would become a list of its characters.
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
        # After the conversions above, so that all values are Python's own numbers and tuples.
        checks = [
            *((name, isinstance(getattr(self, name), bool), "true or false") for name in FLAGS),
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "finite, and 0 (greedy) or above"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", -1 <= self.top_k <= BIGGEST, "-1 or 0 (off), or from 1 to 2**31 - 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop", not any(map(lone_surrogate, self.stop)), "Unicode, without halves of surrogate pairs"),
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


# By the types that the fields state, so that a new parameter is checked without a list to enter it in.
FLAGS: Final = tuple(one.name for one in fields(SamplingParams) if one.type == "bool")
NUMBERS: Final = tuple(one.name for one in fields(SamplingParams) if one.type == "float")
OPTIONAL: Final = tuple(one.name for one in fields(SamplingParams) if one.type == "int | None")
INTEGERS: Final = (*(one.name for one in fields(SamplingParams) if one.type == "int"), *OPTIONAL)


def schema_text(name: str, schema: Any) -> str:
    """A JSON schema as text. Raises RequestError unless it is a JSON object."""
    try:
        parsed = from_json(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"{name} is {text}; it has to be a JSON schema, which is an object")
    return text


def biases(name: str, given: Any) -> dict[int, float]:
    """A mapping of token ids to biases in Python's own numbers. Raises RequestError for anything else."""
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} is {given!r}; it has to map token ids to biases")
    return {whole(name, token): number(name, value) for token, value in given.items()}


def unicode_text(name: str, value: Any) -> str:
    """The value, if it is a non-empty string of valid Unicode: JSON can also carry lone surrogates."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} is {value!r}; it has to be a string, not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: {error}") from None
    return value


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, and for what nests too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


HALF: Final = "holds half of a surrogate pair, which is no character; take it out"
"""Words for a text with a lone surrogate."""


NO_TEXT: Final = "has bytes that are no text in"
"""Words, before an encoding's name, for what a command was given and could not be decoded."""


def lone_surrogate(text: object) -> bool:
    """Whether a text holds half of a surrogate pair, as JSON can carry it: no tokenizer reads it."""
    return isinstance(text, str) and SURROGATE.search(text) is not None


def listed(name: str, values: Any) -> tuple[Any, ...]:
    """The values as a tuple; None is an empty one. Raises RequestError for a value that is no list."""
    # A table's keys and a text's bytes come one by one, too, and are not meant.
    if values is not None and (not isinstance(values, Iterable) or isinstance(values, Mapping | bytes)):
        raise RequestError(f"{name} is {values!r}; it has to be a list")
    return () if values is None else tuple(values)


def whole(name: str, value: Any) -> int:
    """An integer of any library (numpy's, torch's) as Python's own, the only kind that messages to the stages carry."""
    try:
        if not isinstance(value, bool):
            return int(operator.index(value))
    except TypeError:
        pass
    raise RequestError(f"{name} is {value!r}; it has to be a whole number")


def number(name: str, value: Any) -> float:
    """A real number of any library as Python's own float. Raises RequestError for anything else."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it has to be a number")
    return float(value)


@dataclass(frozen=True)
class Logprob:
    """The log-probability and rank of one token under the model, before temperature, filters and penalties."""

    logprob: float
    """Natural logarithm of its probability, at most 0."""
    rank: int
    """Its place among all tokens by probability; 1 is the most probable."""


@dataclass
class SpeculationMetrics:
    """Counts of the tokens that were drafted, entered and accepted for one completion."""

    drafts: int = 0
    """Trees that were drafted. Each begins with its root's first child, and ends with a miss or with its last leaf."""
    accepted: int = 0
    """Drafted tokens that became part of the output."""
    misses: int = 0
    """The target's tokens that no drafted child of the root carried."""
    drafted_nodes: int = 0
    """Tokens that the drafter proposed."""
    rows_entered: int = 0
    """Tokens that entered the pipeline, those of the prompt among them."""
    rows_dead: int = 0
    """Those of ``rows_entered`` that were found wrong while they were in flight."""

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens per tree, the target's own among them (vLLM's definition); 1 without drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def hit_rate(self) -> float:
        """Share, 0 to 1, of the target's tokens that were among the root's drafted children (PipeDec's accuracy).

        0 before the first result.
        """
        results = self.accepted + self.misses
        return self.accepted / results if results else 0.0


@dataclass
class CompletionOutput:
    """One of a request's ``n`` completions.

    ```python
    from penstock import CompletionOutput, FinishReason

    completion = CompletionOutput(index=0, token_ids=[17, 4], text="os", finish_reason=FinishReason.LENGTH)
    print(completion.text, len(completion.token_ids), completion.finish_reason == "length")
    ```
    """

    index: int
    """The completion's number, 0 to ``n`` - 1."""
    token_ids: list[int] = field(default_factory=list)
    """The output's tokens, the one that ended it among them."""
    text: str = ""
    """The tokens' text, in whole characters; empty with ``skip_tokenizer_init``."""
    finish_reason: FinishReason | None = None
    """Why it ended; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it; None where EOS or something else did."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token of the output its own log-probability and those asked for, by token id, most probable first.
    None where none were asked for. Tokens that the request was resumed with have none."""
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    """Counts of the tokens that were drafted, entered and accepted for it."""
    first_token_seconds: float | None = None
    """Seconds from the request's submission to the first token; None until then."""
    seconds: float | None = None
    """Seconds from the request's submission to the end; None until then."""
    speed_up: float | None = None
    """Ratio of its speed after the first token to that of plain decoding, which the engine has measured in this run or
    which its emulated devices are modelled to have. None where that is not known, where nothing drafts, where another
    request ran at the same time, and for up to 8 tokens, whose time is chance."""
    resumed: int = 0
    """How many of ``token_ids``, the first ones, the request was resumed with (``AsyncLLM.resume``)."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first, without the prompt's time; None until the end, and for fewer than two."""
        decoding = (self.seconds or 0.0) - (self.first_token_seconds or 0.0)
        generated = len(self.token_ids) - self.resumed
        return (generated - 1) / decoding if generated > 1 and decoding > 0 else None


@dataclass
class RequestOutput:
    """A request and its completions, shaped like vLLM's.

    ```python
    import json
    from dataclasses import asdict

    from penstock import CompletionOutput, RequestOutput

    output = RequestOutput("1", "import ", [3], [CompletionOutput(0, [17], "os")], finished=True)
    print(json.dumps(asdict(output)))
    ```
    """

    request_id: str
    """The id that the request was submitted with, or a generated one."""
    prompt: str | None
    """The prompt's text; None where only token ids were given."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it, the tokens that the tokenizer adds among them."""
    outputs: list[CompletionOutput]
    """The ``n`` completions, in order of their index."""
    finished: bool
    """Whether all completions have ended."""
    num_cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the prefix cache."""
    outline: OutlineOutput | None = None
    """How the answer came about, where ``outline_decoding`` was "on" or "auto"; None where it was "off"."""


@dataclass
class OutlineOutput:
    """How an answer that was asked for with ``outline_decoding`` came about.

    An answer of points is not what plain decoding of the question gives. Each of its points is what plain decoding of
    that point's own prompt gives, token for token.

    ```python
    from penstock import OutlineOutput

    outline = OutlineOutput(used=True, reason='outline_decoding is "on"', titles=["Water", "The wheel"])
    print(outline.used, outline.titles)
    ```
    """

    used: bool = False
    """Whether the answer is made of points; else it is the plain answer."""
    reason: str = ""
    """Why the answer is made of points, or why it is not."""
    kind: str | None = None
    """Form that the target gives the answer, where it was asked ("auto"): list, code, math, short or text."""
    titles: list[str] = field(default_factory=list)
    """Titles of the points, in order; empty where there are none."""
    points: list[RequestOutput] = field(default_factory=list)
    """The points' own requests, in order, where the answer is made of them."""
    guides: list[RequestOutput] = field(default_factory=list)
    """The requests before the points: the question for the answer's form, and that for its outline."""
