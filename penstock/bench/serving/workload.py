"""The requests of a serving bench, with prompts of a file or random ones of a given length."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.bench.prompts import read_prompts
from penstock.bench.serving.options import DEFAULT_INPUT, RANDOM, ServingOptions
from penstock.clients.api import ServerError

NOUNS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name"
)
WORDS: Final = NOUNS.split()
"""The words of random prompts: most are one or two tokens in most vocabularies."""

CountTokens = Callable[[str], Awaitable[int]]
"""Returns the tokens that the server counts in a request with this prompt."""


@dataclass(frozen=True)
class Workload:
    """``asked`` are the requests' bodies in order of arrival; ``warmups`` are sent before, with other prompts.

    ``repeated`` is the number of different prompts where there are fewer than requests, else None.
    """

    asked: list[dict[str, Any]]
    warmups: list[dict[str, Any]]
    repeated: int | None


async def make_workload(options: ServingOptions, model: str, count_tokens: CountTokens) -> Workload:
    """Make the requests. Raises ConfigError for an unusable file, and ServerError where the server counts no tokens."""
    wanted = options.num_prompts + options.num_warmups
    if options.dataset != RANDOM:
        prompts = read_prompts(options.dataset, wanted)
    else:
        length = await words_for(options.input_len or DEFAULT_INPUT, count_tokens)
        prompts = random_prompts(wanted, length, options.seed)
    bodies = [body_of(options, model, prompts[i % len(prompts)], options.seed + i) for i in range(wanted)]
    repeated = len(prompts) if len(prompts) < options.num_prompts else None
    return Workload(bodies[: options.num_prompts], bodies[options.num_prompts :], repeated)


def body_of(options: ServingOptions, model: str, prompt: str, seed: int) -> dict[str, Any]:
    """One request's JSON. ``ignore_eos`` is vLLM's extension, so it is sent only where it is wanted."""
    text = {"prompt": prompt} if options.endpoint == "completions" else {"messages": [user(prompt)]}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": model, **text, "max_tokens": options.output_len, "temperature": options.temperature, "seed": seed}
    return {**body, **stream, **({"ignore_eos": True} if options.ignore_eos else {})}


def user(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


async def words_for(tokens: int, count_tokens: CountTokens) -> int:
    """Number of random words that have ``tokens`` tokens on average, by the server's count and without its tokenizer.

    A prompt with all words twice has exactly their tokens more than one with all words once; the rest of the count is
    what the server adds.
    """
    once, twice = [await count_tokens(" ".join(times * WORDS)) for times in (1, 2)]
    if twice <= once:
        raise ServerError("no usage", "the server's usage does not grow with the prompt, so use a file")
    per_word = (twice - once) / len(WORDS)
    # once = added + words, twice = added + 2 * words
    added = 2 * once - twice
    return max(1, round((tokens - added) / per_word))


def random_prompts(count: int, words: int, seed: int) -> list[str]:
    """Prompts of ``words`` words each. A different length changes no word of the common part."""
    return [" ".join(np.random.default_rng((seed, i)).choice(WORDS, size=words)) for i in range(count)]
