"""The demo's models and prompts: the small chat model where it can be fetched, else the shipped pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from penstock.bench.prompts import read_prompts
from penstock.core import SamplingParams
from penstock.engine import options
from penstock.engine.job import Prompt
from penstock.library.names import DEFAULT
from penstock.library.pull import place_of, title_of_default
from penstock.library.reference import PAIR
from penstock.library.refusals import Unreachable
from penstock.speculation import SpeculativeConfig
from penstock.text.chat import ChatFormat, chat_prompt
from penstock.text.tokenizer import Tokenizer

STRATEGY: Final = "auto"
PROMPTS: Final = 2
TOKENS: Final = 48
"""Tokens of the pair per prompt: both runs of two prompts and the start take three quarters of a minute."""
ANSWER: Final = 96
"""Most tokens of an answer."""
CODE: Final = """\
def area(width, height):
    return width * height


def volume(width, height, depth):
    return width * height * depth"""
TEXT: Final = (
    "A penstock is a pipe that carries water from a reservoir to a turbine. The water turns the turbine, and the "
    "turbine drives a generator. When the gate of the penstock is closed, the water stops and the turbine stops "
    "with it."
)
QUESTIONS: Final = (
    f"What does this Python code do? Show it again first.\n\n{CODE}",
    f"Quote what this text says about the turbine.\n\n{TEXT}",
)
"""Prompts whose answers repeat some of their text, which is where prompt lookup finds drafts."""
CHAT_WORDS: Final = "{} answers greedily; drafts are looked up in the text so far: it repeats itself."
PAIR_WORDS: Final = (
    "The pair that comes with the package continues Python source. Its target has 7 million parameters: the text has "
    "the form of Python and little sense."
)


@dataclass(frozen=True)
class Scene:
    """The models and prompts of a demo. ``shown`` are the prompts as people see them; ``params`` those of each."""

    model: str
    words: str
    speculation: SpeculativeConfig
    shown: Sequence[str]
    params: Sequence[SamplingParams]
    is_chat: bool = False

    @property
    def quantization(self) -> str:
        """int8 for the chat model, whose time then grows least with rows: all boards share this host's cores."""
        from penstock.models.quantization.pack import usable

        return "int8" if self.is_chat and usable("int8") else "auto"

    def prompts(self, tokenizer: Tokenizer) -> list[Prompt]:
        if not self.is_chat:
            return list(self.shown)
        asked = ([{"role": "user", "content": text.strip()}] for text in self.shown)
        return [chat_prompt(tokenizer, messages, ChatFormat()) for messages in asked]


def scene_for(console: Console, *, embedded: bool) -> Scene:
    """The pair's scene if ``embedded``, or if the default model can be reached nowhere, which is printed."""
    if embedded:
        return pair_scene()
    try:
        return chat_scene(place_of(DEFAULT, console))
    except Unreachable as error:
        console.print(f"{error}. The demo shows the pair of small models that comes with the package.", soft_wrap=True)
        return pair_scene()


def chat_scene(model: str) -> Scene:
    params = [SamplingParams(temperature=0.0, max_tokens=ANSWER)] * len(QUESTIONS)
    speculation = SpeculativeConfig(method="ngram", strategy=STRATEGY)
    words = CHAT_WORDS.format(title_of_default())
    return Scene(model, words, speculation, [f"{text}\n\n" for text in QUESTIONS], params, is_chat=True)


def pair_scene() -> Scene:
    """The shipped pair's scene. It samples, since so small a model repeats itself greedily, and ignores end tokens, so
    that all texts have the same length."""
    prompts = read_prompts(options.DEMO / "prompts.jsonl", PROMPTS)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(len(prompts))]
    speculation = SpeculativeConfig(method="draft_model", model=PAIR, strategy=STRATEGY)
    return Scene(PAIR, PAIR_WORDS, speculation, prompts, params)
