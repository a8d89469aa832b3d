"""Hostile bodies: each is answered or refused with a typed error, and nobody else notices."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Final

from benchmarks.load.attacking.mutations import mutate
from benchmarks.load.attacking.victim import Victim, scrambled, victim
from benchmarks.load.soaking.cases import drawn_body

PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
FIELDS: Final = (
    *(
        "prompt",
        "messages",
        "role",
        "content",
        "type",
        "text",
        "tools",
        "tool_choice",
        "function",
        "name",
        "parameters",
    ),
    *("model", "max_tokens", "max_completion_tokens", "n", "best_of", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "allowed_token_ids", "logprobs"),
    *("top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "echo", "stream"),
    *("stream_options", "include_usage", "response_format", "json_schema", "schema", "structured_outputs", "regex"),
    *("guided_regex", "guided_json", "guided_choice", "guided_grammar", "choice", "grammar", "json", "user", "suffix"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("tool_calls", "tool_call_id", "tokens", "add_special_tokens", "return_token_ids", "priority", "prompt_logprobs"),
)
DEEP: Final = (b"[" * 100_000, b'{"prompt":' * 20_000, b'{"messages":' + b'[{"content":' * 10_000)
EVERY: Final = 10
"""Attempts between two looks at how others fare."""


class Bodies:
    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._left = EVERY

    def attempt(self, rng: random.Random) -> str:
        path, body = hostile(rng)
        answer = self._victim.post(path, body, half=rng.random() < 0.2)
        self._victim.check(answer, body)
        self._left -= 1
        if not self._left:
            self._left = EVERY
            self._victim.check_others()
        return str(answer.status)


@contextmanager
def attacked() -> Iterator[Bodies]:
    with victim() as server:
        yield Bodies(server)
        server.check_others()


def hostile(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body."""
    path = rng.choice(PATHS)
    if rng.random() < 0.02:
        return path, rng.choice(DEEP)
    content: Any = sound(path, rng)
    for _ in range(rng.randint(1, 3)):
        content = mutate(content, FIELDS, lambda options, _: rng.choice(options))
    body = json.dumps(content).encode()
    return path, scrambled(body, rng) if rng.random() < 0.2 else body


def sound(path: str, rng: random.Random) -> dict[str, Any]:
    if path == "/detokenize":
        return {"tokens": [rng.randrange(2000) for _ in range(rng.randrange(20))]}
    if path == "/tokenize":
        return rng.choice(({"prompt": "a text"}, {"messages": [{"role": "user", "content": "a text"}]}))
    body = deepcopy(drawn_body(rng)[1])  # parts of it are others' too
    body["max_tokens"] = rng.randint(1, 8)
    body["stream"] = rng.random() < 0.5
    asked = body.pop("messages", None) or [{"role": "user", "content": body.pop("prompt", "a")}]
    if path == "/v1/completions":
        return {**body, "prompt": asked[-1]["content"]}
    if rng.random() < 0.3:
        function = {"name": "look_up", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
        body["tools"] = [{"type": "function", "function": function}]
    return {**body, "messages": asked}
