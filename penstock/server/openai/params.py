"""From a request's fields to token ids and ``SamplingParams``."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from penstock.core import SamplingParams, StructuredOutputsParams
from penstock.outlines.steps import Dialogue
from penstock.server.http.errors import invalid_field, too_long
from penstock.server.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields, Message, Tool
from penstock.server.openai.tools import ReplyPlan, add_structure, structures
from penstock.text.chat import ChatFormat, render_turns, turns_of
from penstock.text.tokenizer import Tokenizer
from penstock.text.workers import aside

# -------------------------------------------------------------------------------------------------------------- prompts
# From a request's text or messages to token ids, on threads beside the event loop, as a long text takes a while.


@dataclass
class Prompt:
    """A prompt's text, and the tokens that it is encoded as."""

    text: str
    token_ids: list[int]

    @property
    def inputs(self) -> dict[str, Any]:
        """The prompt in the form that the engine takes."""
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


class Room(NamedTuple):
    """Room behind a prompt: ``tokens`` may follow it; ``of`` is the model's limit on prompt and output together."""

    tokens: int
    of: int


class Prompts:
    """Prompts of one tokenizer. Workers do whatever a client can make expensive; clients take turns in their queue."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, allow_special_tokens: bool = False) -> None:
        """``allow_special_tokens``: special tokens in users' texts are special, like the chat template's own."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._allow_special_tokens = allow_special_tokens

    async def of_text(self, text: str, add_special_tokens: bool = True) -> Prompt:
        """A text as a prompt. Raises RequestError for text that is not valid Unicode."""
        return await aside(lambda: Prompt(text, self.tokenizer.encode(text, add_special_tokens)))

    async def of_ids(self, ids: Sequence[int], field: str = "prompt") -> Prompt:
        """Token ids with their text. Raises ApiError naming ``field`` for ids that the model does not have."""

        def decode() -> Prompt:
            last = len(self.tokenizer) - 1
            for token in ids:
                if not 0 <= token <= last:
                    raise invalid_field(field, f"holds {token}; the model's token ids are 0 to {last}")
            return Prompt(self.tokenizer.decode(ids, skip_special_tokens=False), list(ids))

        return await aside(decode)

    async def names(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return await aside(lambda: [self.tokenizer.decode([one], skip_special_tokens=False) for one in ids])

    async def of_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation as a prompt. Raises RequestError if the template refuses it, ApiError naming a field."""
        if self.tokenizer.tool_template is None:
            problem = "need a chat template, and this model has none: give the server one with --chat-template"
            raise invalid_field("messages", f"{problem}, or use /v1/completions")
        turns = turns_of([message.as_turn() for message in messages])
        described = None if not tools else [tool.model_dump(exclude_none=True) for tool in tools]

        def read(value: Any, where: str) -> Any:
            # Special tokens in a user's text are hidden from the tokenizer, and shown again in the prompt's text.
            return value if self._allow_special_tokens else self.tokenizer.literal.hide(value, where)

        def render() -> str:
            messages, tools = read(turns, "messages"), read(described, "tools")
            variables = read(options, "chat_template_kwargs")
            return render_turns(self.tokenizer, messages, True, tools=tools, options=variables)

        rendered = await aside(render)
        return await aside(lambda: self._encode_chat(rendered))

    def _encode_chat(self, rendered: str) -> Prompt:
        """A rendered conversation as a prompt; the template's own special tokens are special in any case."""
        if self._allow_special_tokens:
            return Prompt(rendered, self.tokenizer.encode_rendered(rendered))
        return Prompt(self.tokenizer.literal.show(rendered), self.tokenizer.encode_literal(rendered))

    def room(self, prompt: Prompt, field: str) -> Room:
        """The room behind a prompt. Raises ApiError naming ``field`` if no token fits."""
        room = self.max_model_len - len(prompt.token_ids)
        if not prompt.token_ids:
            raise invalid_field(field, "holds no token; there has to be at least one")
        if room < 1:
            problem = f"is {len(prompt.token_ids)} tokens long, and at least one is to be generated: shorten it."
            raise too_long(field, problem, self.max_model_len)
        return Room(room, self.max_model_len)

    def dialogue(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> Dialogue:
        """A conversation to be answered in points. Raises RequestError as ``of_chat`` does."""
        chat = ChatFormat(chat_template_kwargs=options)
        return Dialogue(self.tokenizer, [message.as_turn() for message in messages], chat)


# --------------------------------------------------------------------------------------------------------------- params
# From a request's fields to ``SamplingParams``.

CONVERTED: Final = frozenset({"max_tokens", "logit_bias", "structured_outputs"})
"""Fields of ``SamplingParams`` that requests write otherwise, or that depend on the prompt."""
SAME_NAME: Final = tuple(
    parameter.name
    for parameter in fields(SamplingParams)
    if parameter.name in GenerationFields.model_fields and parameter.name not in CONVERTED
)
"""Fields of ``SamplingParams`` that a request has under the same name: each is handed over as it is."""
LARGEST_SEED: Final = 2**63 - 1
"""The largest seed of ``SamplingParams``."""
DIGITS: Final = 10
"""Digits of the largest token id, 2**31 - 1; Python refuses to read numbers with thousands of digits."""


@dataclass
class RequestParams:
    """Sampling parameters, and the request's names for those that it calls otherwise."""

    sampling: SamplingParams
    names: dict[str, str] = field(default_factory=dict)
    parts: Mapping[str, StructuredOutputsParams] = field(default_factory=dict)
    """The parts of the output's structure, by the request's field that holds each."""


def chat_params(body: ChatCompletionRequest, defaults: SamplingParams, room: Room, plan: ReplyPlan) -> RequestParams:
    """The parameters of a chat. All of the ``room`` behind the prompt may be generated unless the request says fewer.

    Raises ApiError naming the field.
    """
    if body.max_tokens not in (None, body.max_completion_tokens) and body.max_completion_tokens is not None:
        raise invalid_field("max_tokens", "is set beside max_completion_tokens, its newer name; remove it")
    if body.top_logprobs and not body.logprobs:
        raise invalid_field("top_logprobs", "is set without logprobs; set logprobs to true")
    shared = fields_of(body, defaults)
    newer = fitting(body, "max_completion_tokens", room)
    given: dict[str, Any] = {"max_tokens": newer or fitting(body, "max_tokens", room) or room.tokens}
    if newer is not None:
        shared.names["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
        shared.names["logprobs"] = "top_logprobs"
    found = structures(body) | plan.structures
    if plan.marks_are_special:
        given["skip_special_tokens"] = False
    add_structure(given, shared.names, found)
    return RequestParams(replace(shared.sampling, **given), shared.names, plan.parts)


def completion_params(body: CompletionRequest, defaults: SamplingParams, room: Room) -> RequestParams:
    """The parameters of a completion. ``room`` is what is left behind the prompt. Raises ApiError naming the field."""
    shared = fields_of(body, defaults)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid_field("best_of", f"is {body.best_of}, n is {body.n or 1}; remove it: every choice is returned")
    if body.echo and body.logprobs is not None:
        raise invalid_field("echo", "is set with logprobs, and a prompt's tokens have none here; remove one")
    given: dict[str, Any] = {"max_tokens": fitting(body, "max_tokens", room) or min(defaults.max_tokens, room.tokens)}
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    add_structure(given, shared.names, structures(body))
    return RequestParams(replace(shared.sampling, **given), shared.names)


def fields_of(body: GenerationFields, defaults: SamplingParams) -> RequestParams:
    """The parameters that both APIs share, over the model's defaults."""
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        given["seed"] = body.seed & LARGEST_SEED  # OpenAI allows negative seeds
    if body.stop is not None:
        given["stop"] = [stop for stop in ([body.stop] if isinstance(body.stop, str) else body.stop) if stop]
    if body.logit_bias is not None:
        given["logit_bias"] = {token_id(key): value for key, value in body.logit_bias.items()}
    if body.min_tokens is not None:
        # ``max_tokens`` is raised for now: min_tokens is checked against the real one once that is known.
        given["max_tokens"] = max(defaults.max_tokens, body.min_tokens)
    return RequestParams(replace(defaults, **given))


def fitting(body: GenerationFields, name: str, room: Room) -> int | None:
    """The tokens asked for by the field ``name``, or None. Raises ApiError where they do not fit behind the prompt."""
    wanted: int | None = getattr(body, name)
    if wanted is not None and wanted > room.tokens:
        raise too_long(name, f"is {wanted}; behind this prompt there is room for {room.tokens} tokens.", room.of)
    return wanted


def token_id(key: str) -> int:
    """A key of ``logit_bias`` as a token id. Raises ApiError for anything else."""
    if not (key.isascii() and key.isdigit() and len(key) <= DIGITS):
        raise invalid_field("logit_bias", f"has the key {reprlib.repr(key)}; its keys are token ids, as text")
    return int(key)
