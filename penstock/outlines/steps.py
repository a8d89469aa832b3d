"""Answers in points (Jupiter, section V): guides, the prompts and requests of each step, and how outlines are read."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from penstock.core import (
    OUTLINE_MODES,
    FinishReason,
    OutlineOutput,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.text.chat import ChatFormat, Messages, encoded, rendered, text_in, turns_of
from penstock.text.tokenizer import Tokenizer

# ------------------------------------------------------------------------------------------------------------- dialogue
# A question as the prompts of an answer in points. Guides come first in them, since they are the same for every
# question: their keys and values are computed once and found in the cache from then on.

BETWEEN: Final = "\n\n"
"""Separator between a guide and what follows it, and between the messages of a text without a chat template."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as text, in which special tokens of messages are hidden (``text/tokenizer.py``), and as token ids.

    The first ``fixed`` token ids are the same for every question.
    """

    text: str
    ids: list[int]
    fixed: int = 0


class Dialogue:
    """A conversation that ends with a question; where ``chat`` is None, a plain text that is the question.

    Raises RequestError as ``LLM.chat`` does, and for messages that do not end with the user's.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Messages, chat: ChatFormat | None) -> None:
        self._tokenizer = tokenizer
        self._messages = turns_of(messages)
        self._chat = chat
        check_format(chat)
        if self._messages[-1]["role"] != "user":
            raise RequestError(
                "messages do not end with the user's; an answer in points needs a question (outline_decoding)"
            )
        self.question = text_in(self._messages[-1]["content"])

    @property
    def is_chat(self) -> bool:
        """Whether a chat template renders the prompts."""
        return self._chat is not None

    @classmethod
    def of_text(cls, tokenizer: Tokenizer, text: str) -> Dialogue:
        """The dialogue of a plain text, without a chat template."""
        return cls(tokenizer, [{"role": "user", "content": text}], None)

    def plain(self) -> dict[str, Any]:
        """The prompt of an ordinary answer, for the engine. A text is continued as it stands."""
        if self._chat is None:
            return {"prompt": self.question, "prompt_token_ids": self._tokenizer.encode(self.question)}
        return encoded(self._tokenizer, rendered(self._tokenizer, self._messages, self._chat))

    def guided(self, guide: str, opening: str = "", question: str | None = None) -> Rendered:
        """The prompt of guide, conversation and the answer's ``opening``; ``question`` replaces the conversation."""
        messages = self._messages if question is None else [{"role": "user", "content": question}]
        text = self._render(guide, messages, opening)
        ids, hidden = self._encode(text), self._hide(guide)
        # A token may reach over the guide's end: only the ids that the whole prompt and its beginning have in common
        # are the same for every question.
        beginning = self._encode(text[: text.index(hidden) + len(hidden)]) if hidden in text else []
        return Rendered(text, ids, common(ids, beginning))

    def followed(
        self, before: Rendered, guide: str, said: str, ids: Sequence[int], asked: str, opening: str
    ) -> Rendered:
        """The prompt that continues ``before``: the target's answer ``said``, the next question, and ``opening``.

        The token ids begin with those of ``before`` and of the answer (``ids``), so that keys and values are reused,
        provided that the template writes an earlier answer as it writes the beginning of one.
        """
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]
        text = self._render(guide, [*self._messages, *more], opening)
        shared = before.text + self._hide(said)
        # Templates may rewrite earlier turns (some drop an answer's reasoning): then nothing can be reused.
        if not text.startswith(shared):
            return Rendered(text, self._encode(text))
        # The answer's own token ids, not its text encoded anew: one text may have several encodings, and the cache
        # finds keys and values by ids. The template writes the end of the turn itself, hence no EOS token.
        known = [*before.ids, *takewhile(lambda token: token not in self._tokenizer.eos_token_ids, ids)]
        return Rendered(text, known + self._tokenizer.encode_literal(text[len(shared) :]))

    def shown(self, prompt: Rendered) -> dict[str, Any]:
        """The prompt, for the engine: hidden tokens are written out in its text."""
        text = prompt.text if self._chat is None else self._tokenizer.literal.show(prompt.text)
        return {"prompt": text, "prompt_token_ids": prompt.ids}

    def forks(self, prompt: Rendered, words: Sequence[str]) -> tuple[Rendered, list[int]]:
        """The prompt up to where it would go on with one of ``words``, and the first token of each word there.

        No two words may begin with the same letter.
        """
        ways = [self._encode(f"{prompt.text} {word}") for word in words]
        # Encoded with the prompt, since a word's tokens depend on the text before it.
        # The words' tokens may begin alike, for example with one for the space: the fork is where they first differ.
        same = min(common(ways[0], way) for way in ways[1:])
        tokens = [way[same] for way in ways]
        if len(set(tokens)) == len(words):
            return replace(prompt, ids=ways[0][:same]), tokens
        # In some tokenizers the space is a token of its own before a part of the words only.
        alone = [self._tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        return replace(prompt, text=prompt.text + " ", ids=self._encode(prompt.text + " ")), alone

    def _render(self, guide: str, messages: Sequence[Mapping[str, Any]], opening: str) -> str:
        """The text of guide, messages and opening, by the chat template if there is one."""
        if self._chat is None:
            texts = [guide, *(str(message["content"]) for message in messages), opening]
            return BETWEEN.join(texts)
        try:
            text = rendered(self._tokenizer, with_system(guide, messages), self._chat)
        except RequestError:  # the template allows no system message
            text = rendered(self._tokenizer, with_first_user(guide, messages), self._chat)
        return text + self._hide(opening)

    def _encode(self, text: str) -> list[int]:
        """Token ids of a text that ``_render`` gave."""
        # A template writes BOS itself, and its hidden special tokens have to stay text.
        return self._tokenizer.encode(text) if self._chat is None else self._tokenizer.encode_literal(text)

    def _hide(self, text: str) -> str:
        """A message's text with its special tokens hidden; without a chat template the text itself."""
        hidden: str = text if self._chat is None else self._tokenizer.literal.hide(text, "messages")
        return hidden


def check_format(chat: ChatFormat | None) -> None:
    """Raise RequestError, naming the field, for a chat format with which there can be no answer in points."""
    if chat is None:
        return
    if chat.tools:
        raise RequestError(
            "tools are described to the model; an answer in points calls none: leave outline_decoding off"
        )
    if not chat.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt is False; an answer in points has turns of its own (outline_decoding)"
        )


def with_system(guide: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the guide as system message, in front of the text of a system message that is there already."""
    first, rest = messages[0], messages[1:]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": guide + BETWEEN + str(first["content"])}, *rest]
    return [{"role": "system", "content": guide}, *messages]


def with_first_user(guide: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the guide in front of the user's first message."""
    at = next(i for i, message in enumerate(messages) if message["role"] == "user")
    first = {**messages[at], "content": guide + BETWEEN + str(messages[at]["content"])}
    return [*messages[:at], first, *messages[at + 1 :]]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two lists of token ids."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# ---------------------------------------------------------------------------------------------------------------- guide
# Guide prompts: instructions to the target ahead of a question, in the question's language.

GUIDES: Final = Path(__file__).parent / "guides"
"""The folder of the guides, one TOML file for each language."""
DEFAULT: Final = "en"
"""The language of a question that has no word of any guide."""
KINDS: Final = ("list", "code", "math", "short", "text")
"""Forms that an answer can have. Only "list" is decoded in points."""
WORD: Final = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W\u3040-\u30ff\u4e00-\u9fff]+")
"""Pattern of a word, or of one character in languages that write without spaces."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """The texts of one language. ``labels`` and ``samples`` have the names in ``KINDS`` as keys."""

    language: str
    words: frozenset[str]
    """The language's commonest words and those of its guide, by which a question's language is recognised."""
    code_words: list[str]
    """Words that show that a question asks for a program. A question that has one by chance gets a plain answer."""
    decide: str
    """Instruction for naming the form of an answer; ends with examples."""
    ask: str
    """Text of a question in the prompt for its form, with the placeholder ``{question}``."""
    opening: str
    """Text in front of the label."""
    labels: dict[str, str]
    """The label of each form, one word; no two begin with the same letter."""
    samples: dict[str, list[str]]
    """Questions of each form, equally many of each, from which the target's bias for labels is learned."""
    outline: str
    """Instruction for writing an outline, which also precedes each point."""
    point: str
    """Request for one point, with the placeholders ``{number}`` and ``{title}``."""


def decision(table: dict[str, Any], labels: dict[str, str], shots: dict[str, list[str]]) -> str:
    """The instruction for naming a form, followed by examples in which the forms take turns."""
    rounds = [list(zip(KINDS, some, strict=True)) for some in zip(*(shots[kind] for kind in KINDS), strict=True)]
    ask, opening = str(table["ask"]), str(table["opening"])
    examples = [f"{ask.format(question=shot)}\n{opening} {labels[kind]}" for one in rounds for kind, shot in one]
    return "\n\n".join([str(table["decide"]).strip(), *examples])


@cache
def guides() -> dict[str, Guide]:
    """All guides, by language."""
    return {file.stem: read_guide(file) for file in sorted(GUIDES.glob("*.toml"))}


def read_guide(file: Path) -> Guide:
    """The guide in a TOML file, whose name without suffix is the language."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    labels, shots = table.pop("labels"), table.pop("shots")
    table["decide"] = decision(table, labels, shots)
    # All texts of the guide count as words of its language, besides the commonest words that the file lists.
    texts: dict[str, Any] = {name: text.strip() if isinstance(text, str) else text for name, text in table.items()}
    texts["code_words"] = table["code_words"].split()
    texts["words"] = frozenset(WORD.findall(str(texts).lower()))
    return Guide(language=file.stem, labels=labels, **texts)


def guide_for(question: str) -> Guide:
    """The guide of the language that has most of the question's words; English where no language has any."""
    words = Counter(WORD.findall(question.lower()))
    found = {name: sum(words[word] for word in guide.words) for name, guide in guides().items()}
    # Among languages with equally many words English wins.
    best = max(found, key=lambda name: (found[name], name == DEFAULT))
    return guides()[best if found[best] else DEFAULT]


# ----------------------------------------------------------------------------------------------------------------- asks
# The requests of one step on the way to an answer in points.


@dataclass(frozen=True)
class Ask:
    """A request to the target. The first ``pinned`` token ids of its prompt are the same for every question."""

    name: str
    prompt: dict[str, Any]
    params: SamplingParams
    pinned: int = 0


@dataclass(frozen=True)
class Step:
    """Requests that run at the same time. The outputs of the ``last`` step are the answer, each after its heading."""

    asks: list[Ask]
    report: OutlineOutput
    last: bool = False
    headings: list[str] = field(default_factory=list)


Steps = Generator[Step, list[RequestOutput], None]
"""Steps of an answer; each step's outputs are sent back, in the order of its requests, to get the next step."""


# ---------------------------------------------------------------------------------------------------------------- forms
# The form of an answer: told by the question's words, or named by the target with one token.
#
# A question about code, or one that contains a long text, is answered plainly whatever the target says: small targets
# call nearly everything a list, and points cost most there (Jupiter, Table VII).
#
# A language model prefers some labels whatever the question is. The mean log-probability that it gives each label, over
# questions of which each form has equally many, is therefore subtracted from the label's score (batch calibration, Zhou
# et al. 2023, arXiv 2309.17249). That mean is learned once per target, from a guide's own questions.

NOTATIONS: Final = ("```", "python", "javascript", "typescript", "c++", "c#", "html", "css", "sql", "regex", "bash")
"""Signs of code in a question of any language."""
OWN_TEXT: Final = 120
"""Words above which a question is taken to contain the text that its answer is about. A longer one is seldom a question
alone."""
LOOKED_AT: Final = 100
"""Number of the most probable tokens whose log-probabilities a sample's answer reports: the most that there may be."""
UNSEEN: Final = -12.0
"""Log-probability assumed for a label that is not among the ``LOOKED_AT`` tokens. It is 6 in a million; a label that is
not among them has at most 1 in 100."""


class Forms:
    """The label biases learned for one target, for each language, with a chat template and without."""

    def __init__(self) -> None:
        self._bias: dict[tuple[str, bool], dict[int, float]] = {}
        """Bias added to a label's score, by the label's token; the tokens are in the order of ``KINDS``."""

    def know(self, dialogue: Dialogue, guide: Guide) -> bool:
        """Whether the biases of the guide's language are learned, for prompts with or without a chat template."""
        return (guide.language, dialogue.is_chat) in self._bias

    def samples(self, dialogue: Dialogue, guide: Guide) -> list[Ask]:
        """Requests for the probabilities of the labels, one for each of the guide's own questions."""
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=LOOKED_AT)
        questions = [question for kind in KINDS for question in guide.samples[kind]]
        prompts = [asked(dialogue, guide, question)[0] for question in questions]
        return [
            Ask(f"sample-{number}", dialogue.shown(prompt), params, prompt.fixed)
            for number, prompt in enumerate(prompts, 1)
        ]

    def learn(self, dialogue: Dialogue, guide: Guide, said: Sequence[RequestOutput]) -> None:
        """Learn the biases from the samples' outputs. Nothing is learned if any sample was aborted."""
        # An aborted sample has no log-probabilities; the mean of fewer would favour the forms that are left.
        found = [probable[0] for output in said if (probable := output.outputs[0].logprobs)]
        if len(found) < len(said):
            return
        _, tokens = asked(dialogue, guide, dialogue.question)
        self._bias[guide.language, dialogue.is_chat] = {
            token: -sum(one[token].logprob if token in one else UNSEEN for one in found) / len(found)
            for token in tokens
        }

    def question(self, dialogue: Dialogue, guide: Guide) -> Ask:
        """The request for the label of the answer's form: one constrained token."""
        prompt, tokens = asked(dialogue, guide, dialogue.question)
        bias = self._bias.get((guide.language, dialogue.is_chat))
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=tokens, logit_bias=bias)
        return Ask("form", dialogue.shown(prompt), params, prompt.fixed)

    def named(self, dialogue: Dialogue, guide: Guide, said: RequestOutput) -> str | None:
        """The form that the target named, one of ``KINDS``; None where the request was aborted before its token."""
        _, tokens = asked(dialogue, guide, dialogue.question)
        picked = said.outputs[0].token_ids
        return KINDS[tokens.index(picked[0])] if picked else None


def form_seen(question: str, guide: Guide) -> tuple[str, str] | None:
    """The form, one of ``KINDS``, and the reason, where the question's words rule out a list; else None."""
    text, words = question.lower(), WORD.findall(question.lower())
    for sign in (*NOTATIONS, *guide.code_words):
        # A word has to stand alone, as "sql" in "mysqld" does not; other signs may stand anywhere.
        is_word = sign.isascii() and sign.isalpha()
        if sign in (words if is_word else text):
            return "code", f"the question speaks of code: {sign!r}"
    if len(words) > OWN_TEXT:
        return "text", f"the question brings a text of its own: it has {len(words)} words"
    return None


def asked(dialogue: Dialogue, guide: Guide, question: str) -> tuple[Rendered, list[int]]:
    """The prompt that asks for the form of a question's answer, and the labels' tokens in the order of ``KINDS``."""
    prompt = dialogue.guided(guide.decide, guide.opening, guide.ask.format(question=question))
    return dialogue.forks(prompt, [guide.labels[kind] for kind in KINDS])


# -------------------------------------------------------------------------------------------------------------- outline
# An outline: the grammar that constrains it, and the titles read from it.

FEWEST, MOST = 2, 8
"""Fewest and most points of an outline. One point would be decoded as a plain answer is; each further one is asked for
by a prompt of its own."""
TITLE: Final = r"[^\s.*:#。：][^\n.*:#。：]{1,58}[^\s.*:#。：]"
"""Pattern of a point's title: 3 to 60 characters, without the marks of a sentence, a heading or a list."""
LINE: Final = re.compile(rf"(\d+)\. ({TITLE})")
"""Pattern of a line of an outline: the point's number (group 1) and its title (group 2)."""


def grammar() -> StructuredOutputsParams:
    """The grammar of an outline: numbered titles, one per line."""
    return StructuredOutputsParams(regex=lines(1))


def lines(number: int) -> str:
    """A regular expression for the line of the point ``number`` and all lines after it."""
    line = rf"{number}\. {TITLE}" if number == 1 else rf"\n{number}\. {TITLE}"
    if number == MOST:
        return line
    rest = lines(number + 1)
    # Nested, not "(line)*": each line has its own number, and the regular expressions of grammars cannot count.
    return f"{line}{rest}" if number < FEWEST else f"{line}({rest})?"


def titles_of(text: str) -> list[str]:
    """The points' titles without repetitions; [] unless the text is an outline of at least FEWEST different points."""
    found = [LINE.fullmatch(line) for line in text.split("\n")]
    numbers = [None if line is None else int(line.group(1)) for line in found]
    if numbers != list(range(1, len(found) + 1)):
        return []
    titles: dict[str, str] = {}
    for line in found:
        if line is not None:
            # Where titles differ in case alone, the first one stays.
            titles.setdefault(line.group(2).casefold(), line.group(2))
    return list(titles.values()) if len(titles) >= FEWEST else []


# ---------------------------------------------------------------------------------------------------------------- steps
# An answer in points, step by step: the requests to the target, and what follows from its outputs.
#
#     form (auto alone)        outline                    points
#     one constrained token -> numbered titles, under  -> one request each, all at once: they share guide, question
#                              a grammar                  and outline, and are put together in order
#
# Where the form is no list, or the outline cannot be read, the last step is the plain answer.

OUTLINE_TOKENS: Final = 192
"""Most tokens of an outline, on top of ``max_tokens``. Eight points have 24 each."""
SHORT: Final = 48
"""Value of ``max_tokens`` below which an answer is a short one, whatever its form. An outline alone may take four times
as many (``OUTLINE_TOKENS``)."""
LEAST: Final = 8
"""Fewest tokens that a point may be limited to. With fewer a point would end within its first sentence."""


def check_outline(mode: str, params: SamplingParams) -> None:
    """Raise RequestError, naming the field, for parameters that cannot be combined with ``outline_decoding``."""
    if mode not in OUTLINE_MODES:
        raise RequestError(f"outline_decoding is {mode!r}; it has to be one of {', '.join(OUTLINE_MODES)}")
    if mode == "off":
        return
    if params.n != 1:
        raise RequestError(f"n is {params.n}; an answer in points is one: leave n at 1, or outline_decoding off")
    if params.structured_outputs is not None:
        raise RequestError(
            "structured_outputs says what the whole output is; an answer in points has no such form: remove it, or "
            "leave outline_decoding off"
        )


class Answering:
    """The steps of one answer. ``longest``: the most tokens of a prompt and its output together (max_model_len)."""

    def __init__(self, dialogue: Dialogue, params: SamplingParams, forms: Forms, longest: int) -> None:
        self._dialogue = dialogue
        self._params = params
        self._forms = forms
        self._longest = longest
        self._guide: Guide = guide_for(dialogue.question)
        self._report = OutlineOutput()

    def steps(self, mode: str) -> Steps:
        """The steps, the last of which is the answer. Raises RequestError for messages that the template refuses."""
        report = self._report
        if mode == "auto" and not (yield from self._is_list()):
            yield self._plain()
            return
        if mode == "on":
            report.reason = 'outline_decoding is "on"'
        before = self._dialogue.guided(self._guide.outline)
        if len(before.ids) + OUTLINE_TOKENS > self._longest:
            yield self._plain(f"the outline has no room: max_model_len is {self._longest}")
            return
        wanted = SamplingParams(temperature=0, max_tokens=OUTLINE_TOKENS, structured_outputs=grammar())
        (said,) = yield Step([Ask("outline", self._dialogue.shown(before), wanted, before.fixed)], report)
        report.guides.append(said)
        yield self._points(before, said) or self._plain()

    def _is_list(self) -> Generator[Step, list[RequestOutput], bool]:
        """Whether the answer is a list: the question's words may rule it out, else the target is asked."""
        report = self._report
        if self._params.max_tokens < SHORT:
            report.kind, report.reason = "short", f"max_tokens is {self._params.max_tokens}: a short answer"
            return False
        if (seen := form_seen(self._dialogue.question, self._guide)) is not None:
            report.kind, report.reason = seen
            return False
        if not self._forms.know(self._dialogue, self._guide):
            samples = yield Step(self._forms.samples(self._dialogue, self._guide), report)
            self._forms.learn(self._dialogue, self._guide, samples)
        asked = self._forms.question(self._dialogue, self._guide)
        if len(asked.prompt["prompt_token_ids"]) >= self._longest:
            report.reason = f"the question fills max_model_len, {self._longest}, with its guide"
            return False
        (said,) = yield Step([asked], report)
        report.guides.append(said)
        report.kind = self._forms.named(self._dialogue, self._guide, said)
        report.reason = f"the target gives the answer the form {report.kind!r}"
        return report.kind == "list"

    def _points(self, before: Rendered, said: RequestOutput) -> Step | None:
        """The step with one request per point; None, with the reason in the report, where there can be none."""
        report, output = self._report, said.outputs[0]
        if output.finish_reason is FinishReason.ABORT:
            report.reason = "it was aborted"
            return None
        whole = output.finish_reason is FinishReason.STOP
        # An outline that was cut off loses its last line, which may be incomplete.
        titles = titles_of(output.text if whole else output.text.rpartition("\n")[0])
        if not titles:
            report.reason = "the outline is not one of at least two different points"
            return None
        # All points together may have as many tokens as the plain answer.
        share = self._params.max_tokens // len(titles)
        asks, headings = [], []
        for number, title in enumerate(titles, 1):
            opening = f"**{title}**:"
            asked = self._guide.point.format(number=number, title=title)
            prompt = self._dialogue.followed(before, self._guide.outline, output.text, output.token_ids, asked, opening)
            room = min(share, self._longest - len(prompt.ids))
            if room < LEAST:
                report.reason = f"{len(titles)} points leave {max(room, 0)} tokens for one of them"
                return None
            params = replace(self._params, max_tokens=room, min_tokens=min(self._params.min_tokens, room))
            asks.append(Ask(f"point-{number}", self._dialogue.shown(prompt), params))
            headings.append(f"{BETWEEN if number > 1 else ''}{number}. {opening}")
        report.used, report.titles = True, titles
        return Step(asks, report, last=True, headings=headings)

    def _plain(self, reason: str | None = None) -> Step:
        """The step that asks for an ordinary answer, for ``reason`` or the one that is reported already."""
        self._report.reason = reason or self._report.reason
        return Step([Ask("plain", self._dialogue.plain(), self._params)], self._report, last=True, headings=[""])
