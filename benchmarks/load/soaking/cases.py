"""Requests of many kinds, with the answers that each gets alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock import LLM, SamplingParams
from penstock.core import StructuredOutputsParams

SHARED: Final = (
    "import os\nimport sys\n\n\nclass Node:\n    def __init__(self, value, parent=None):\n        self.value = value\n"
    "        self.parent = parent\n        self.children = []\n\n    def add(self, value):\n"
    "        child = Node(value, self)\n        self.children.append(child)\n        return child\n\n",
    '"""Read a file and count its words."""\n\nfrom collections import Counter\nfrom pathlib import Path\n\n\n'
    "def words(path):\n    text = Path(path).read_text()\n    return Counter(text.lower().split())\n\n\n",
)
"""Beginnings of several blocks that many prompts share."""
SHORT, LONG = (4, 14), (90, 130)
"""Fewest and most tokens. A long answer has to grow beyond the slots that it is admitted with."""
VARIANTS: Final[Mapping[str, tuple[int, Sequence[dict[str, Any]]]]] = {
    "plain": (30, ({},)),
    "filters": (10, ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05, "top_k": 50})),
    "penalties": (
        15,
        (
            {"presence_penalty": 1.0},
            {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
            {"logit_bias": {"10": 3.0, "11": -100.0}},
            {"allowed_token_ids": list(range(5, 900, 7))},
        ),
    ),
    "structured": (
        12,
        (
            {"structured_outputs": {"choice": ["return None", "return self", "pass"]}},
            {"structured_outputs": {"regex": r"[a-z]{2,8}\(\d{1,3}\)"}},
            {"structured_outputs": {"json": {"type": "object", "properties": {"n": {"type": "integer"}}}}},
        ),
    ),
    "stops": (10, ({"stop": ["\n"]}, {"stop": ["(", "self"], "include_stop_str_in_output": True}, {"min_tokens": 3})),
    "many": (10, ({"n": 2}, {"n": 3})),
    "chat": (8, ({"messages": True},)),
    "long": (5, ({"ignore_eos": True},)),
}
"""Weight of each variant, and the fields that it adds to the body, by name."""
NOT_SAMPLING: Final = ("prompt", "messages", "return_token_ids", "structured_outputs", "logit_bias")


@dataclass(frozen=True)
class Choice:
    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Case:
    """A body for ``path``, and the choices that the request has alone."""

    variant: str
    path: str
    body: dict[str, Any]
    choices: tuple[Choice, ...]


def drawn_cases(count: int, seed: int) -> list[Case]:
    """Cases that depend on the seed alone. Each is decoded by a plain engine of one stage, one request at a time."""
    rng = random.Random(seed)
    drawn = [drawn_body(rng) for _ in range(count)]
    with LLM("demo", max_num_seqs=1, speculative_config={"strategy": "autoregressive"}) as llm:
        prompts = [prompt_of(llm, body) for _, body in drawn]
        outputs = llm.generate(prompts, [params_of(body) for _, body in drawn])
    return [
        Case(
            variant,
            "/v1/chat/completions" if "messages" in body else "/v1/completions",
            body,
            tuple(Choice(one.token_ids, one.text, str(one.finish_reason)) for one in output.outputs),
        )
        for (variant, body), output in zip(drawn, outputs, strict=True)
    ]


def drawn_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A variant's name, and a body of it without ``stream``."""
    (variant,) = rng.choices(list(VARIANTS), [weight for weight, _ in VARIANTS.values()])
    added = rng.choice(VARIANTS[variant][1])
    text = drawn_text(rng)
    asked: dict[str, Any] = {"prompt": text}
    if "messages" in added:
        asked = {"messages": [{"role": "system", "content": SHARED[0]}, {"role": "user", "content": text}]}
        added = {}
    return variant, asked | {
        "max_tokens": rng.randint(*(LONG if variant == "long" else SHORT)),
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "seed": rng.randrange(2**31),
        "return_token_ids": True,
        **added,
    }


def drawn_text(rng: random.Random) -> str:
    """A prompt. Half of the prompts begin alike, the others differ from the first token on."""
    name = rng.choice(("load", "parse", "find", "merge", "count", "split")) + f"_{rng.randrange(1000)}"
    if rng.random() < 0.5:
        return f"{rng.choice(SHARED)}def {name}(path):\n"
    return f"{rng.randrange(10**6)} # {name}\nfor i in range({rng.randrange(100)}):\n"


def prompt_of(llm: LLM, body: Mapping[str, Any]) -> Any:
    if "prompt" in body:
        return body["prompt"]
    return {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(body["messages"])}


def params_of(body: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from the body's fields, which have the same names."""
    given = {name: value for name, value in body.items() if name not in NOT_SAMPLING}
    if "structured_outputs" in body:
        given["structured_outputs"] = StructuredOutputsParams(**body["structured_outputs"])
    if "logit_bias" in body:
        given["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
    return SamplingParams(**given)
