"""Hostile bodies: each is answered or refused with a typed error, and nobody else notices."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
EDGES: Final[Mapping[str, Sequence[Any]]] = {
    "max_tokens": (1, 2, 24, 512, 10**9),
    "temperature": (0, 1e-300, 1e-9, 2, 1e9, -0.0),
    "top_p": (1e-300, 1e-9, 0.5, 1, 0),
    "top_k": (-1, 0, 1, 4096, 10**9),
    "min_p": (1e-300, 1, 0),
    "seed": (0, -1, 2**63 - 1, 2**64 - 1, 2**64, -(2**63)),
    "presence_penalty": (-2, 2, 1e300),
    "frequency_penalty": (-2, 2, -1e300),
    "repetition_penalty": (1e-300, 1e-9, 1, 1e300),
    "logit_bias": ({"0": 100}, {"4095": -100}, {"4096": 1}, {str(token): -100 for token in range(4096)}, {"1": 1e300}),
    "allowed_token_ids": ([0], [4095], [4096], [0, 0], list(range(4096))),
    "stop": ("a", ["a", "b", "\n", " "], "\0", "x" * 10_000, ["\ud800"], ["é", "日本"]),
    "stop_token_ids": ([0], [4095], [4096], list(range(4096))),
    "min_tokens": (0, 8, 512),
    "ignore_eos": (True, False),
    "n": (1, 2, 4, 129),
    "logprobs": (0, 1, 5, 20, True, False),
    "top_logprobs": (0, 1, 20),
    "echo": (True,),
    "stream_options": ({"include_usage": True}, {"include_usage": False, "continuous_usage_stats": True}),
    "prompt": (
        "",
        "</s>",
        [0],
        [[0], [4095]],
        ["a"] * 16,
        ["a"] * 65,
        "a" * 5000,
        "\0",
        "日本" * 100,
        list(range(500)),
        [4096],
    ),
    "messages": ([{"role": "user", "content": "</s><s>" * 20}], [{"role": "assistant", "content": "a"}], []),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
}
"""Values at and just beyond the edge of what a field may be."""
DEEP: Final = (b"[" * 100_000, b'{"prompt":' * 20_000, b'{"messages":' + b'[{"content":' * 10_000)
EVERY: Final = 10
"""Attempts between two checks of how others fare."""
BESIDE: Final = 0.2
"""Fraction of the attempts beside which another request runs."""


class Bodies:
    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._left = EVERY

    def attempt(self, rng: random.Random) -> str:
        path, body = hostile(rng)
        with self._victim.beside_others() if rng.random() < BESIDE else nullcontext():
            answer = self._victim.post(path, body, half=rng.random() < 0.2)
        self._victim.check(answer, body)
        self._left -= 1
        if not self._left:
            self._left = EVERY
            self._victim.check_others()
        return answer.outcome


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
    content: Any = deepcopy(sound(path, rng))  # a copy, since its parts are shared
    for field in rng.choices(list(EDGES), k=rng.choice((0, 1, 1, 2))):
        if field not in ("prompt", "messages") or field in content:
            content[field] = deepcopy(rng.choice(EDGES[field]))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        content = mutate(content, FIELDS, lambda options, _: rng.choice(options))
    body = json.dumps(content).encode()
    return path, scrambled(body, rng) if rng.random() < 0.1 else body


def sound(path: str, rng: random.Random) -> dict[str, Any]:
    if path == "/detokenize":
        return {"tokens": [rng.randrange(2000) for _ in range(rng.randrange(20))]}
    if path == "/tokenize":
        return rng.choice(({"prompt": "a text"}, {"messages": [{"role": "user", "content": "a text"}]}))
    body = drawn_body(rng)[1]
    body["max_tokens"] = rng.randint(1, 8)
    body["stream"] = rng.random() < 0.5
    asked = body.pop("messages", None) or [{"role": "user", "content": body.pop("prompt", "a")}]
    if path == "/v1/completions":
        return {**body, "prompt": asked[-1]["content"]}
    if rng.random() < 0.3:
        function = {"name": "look_up", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
        body["tools"] = [{"type": "function", "function": function}]
    return {**body, "messages": asked}
