"""What form an answer has: the question shows it, or the target names it with one token.

A question that speaks of code, or brings a text of its own, is answered plainly whatever the target says: small targets
call nearly everything a list, and points cost most there (Jupiter, Table VII).

A language model favours labels whatever the question is. What it gives each label in the mean over questions, as many
of one form as of another, is taken off its score (batch calibration, Zhou et al. 2023, arXiv 2309.17249). That is
learned once, from a guide's own questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.core import RequestOutput, SamplingParams
from penstock.outlines.asks import Ask
from penstock.outlines.dialogue import Dialogue, Rendered
from penstock.outlines.guide import KINDS, WORD, Guide

NOTATIONS: Final = ("```", "python", "javascript", "typescript", "c++", "c#", "html", "css", "sql", "regex", "bash")
"""What code is written in, whatever the question's language."""
OWN_TEXT: Final = 120
"""A question of more words brings a text that its answer is about."""
LOOKED_AT: Final = 100
"""Most probable tokens of which a sample's answer tells the probability."""
UNSEEN: Final = -12.0
"""What the logarithm of a label's probability is taken to be where it is not among them."""


class Forms:
    """What has been learned of one target, for each language, with a chat template and without."""

    def __init__(self) -> None:
        self._bias: dict[tuple[str, bool], dict[int, float]] = {}
        """What is added to a label's score, by its token; the tokens in the order of ``KINDS``."""

    def know(self, dialogue: Dialogue, guide: Guide) -> bool:
        return (guide.language, dialogue.is_chat) in self._bias

    def samples(self, dialogue: Dialogue, guide: Guide) -> list[Ask]:
        """The guide's own questions, each for the probabilities of the labels."""
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=LOOKED_AT)
        questions = [question for kind in KINDS for question in guide.samples[kind]]
        prompts = [asked(dialogue, guide, question)[0] for question in questions]
        return [
            Ask(f"sample-{number}", dialogue.shown(prompt), params, prompt.fixed)
            for number, prompt in enumerate(prompts, 1)
        ]

    def learn(self, dialogue: Dialogue, guide: Guide, said: Sequence[RequestOutput]) -> None:
        """What became of the samples. Nothing is learned of those that were aborted."""
        found = [probable[0] for output in said if (probable := output.outputs[0].logprobs)]
        if len(found) < len(said):
            return
        _, tokens = asked(dialogue, guide, dialogue.question)
        self._bias[guide.language, dialogue.is_chat] = {
            token: -sum(one[token].logprob if token in one else UNSEEN for one in found) / len(found)
            for token in tokens
        }

    def question(self, dialogue: Dialogue, guide: Guide) -> Ask:
        """One constrained token: the label of the answer's form."""
        prompt, tokens = asked(dialogue, guide, dialogue.question)
        bias = self._bias.get((guide.language, dialogue.is_chat))
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=tokens, logit_bias=bias)
        return Ask("form", dialogue.shown(prompt), params, prompt.fixed)

    def named(self, dialogue: Dialogue, guide: Guide, said: RequestOutput) -> str | None:
        """One of ``KINDS``; None where the request was aborted before its token."""
        _, tokens = asked(dialogue, guide, dialogue.question)
        picked = said.outputs[0].token_ids
        return KINDS[tokens.index(picked[0])] if picked else None


def form_seen(question: str, guide: Guide) -> tuple[str, str] | None:
    """One of ``KINDS`` and the reason, where the question's words show that its answer is no list."""
    text, words = question.lower(), WORD.findall(question.lower())
    for sign in (*NOTATIONS, *guide.code_words):
        is_word = sign.isascii() and sign.isalpha()
        if sign in (words if is_word else text):
            return "code", f"the question speaks of code: {sign!r}"
    if len(words) > OWN_TEXT:
        return "text", f"the question brings a text of its own: it has {len(words)} words"
    return None


def asked(dialogue: Dialogue, guide: Guide, question: str) -> tuple[Rendered, list[int]]:
    """The prompt, and the tokens of the labels, by ``KINDS``."""
    prompt = dialogue.guided(guide.decide, guide.opening, guide.ask.format(question=question))
    return dialogue.forks(prompt, [guide.labels[kind] for kind in KINDS])
