"""The form of an answer: told by the question's words, or named by the target with one token.

A question about code, or one that contains a long text, is answered plainly whatever the target says: small targets
call nearly everything a list, and points cost most there (Jupiter, Table VII).

A language model prefers some labels whatever the question is. The mean log-probability that it gives each label, over
questions of which each form has equally many, is therefore subtracted from the label's score (batch calibration, Zhou
et al. 2023, arXiv 2309.17249). That mean is learned once per target, from a guide's own questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.core import RequestOutput, SamplingParams
from penstock.outlines.asks import Ask
from penstock.outlines.dialogue import Dialogue, Rendered
from penstock.outlines.guide import KINDS, WORD, Guide

NOTATIONS: Final = ("```", "python", "javascript", "typescript", "c++", "c#", "html", "css", "sql", "regex", "bash")
"""Signs of code in a question of any language."""
OWN_TEXT: Final = 120
"""Words above which a question is taken to contain the text that its answer is about."""
LOOKED_AT: Final = 100
"""Most probable tokens whose log-probability a sample's answer reports."""
UNSEEN: Final = -12.0
"""Log-probability assumed for a label that is not among them."""


class Forms:
    """The label biases learned for one target, for each language, with a chat template and without."""

    def __init__(self) -> None:
        self._bias: dict[tuple[str, bool], dict[int, float]] = {}
        """Bias added to a label's score, by the label's token; the tokens are in the order of ``KINDS``."""

    def know(self, dialogue: Dialogue, guide: Guide) -> bool:
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
        """Learn the biases from the samples' outputs; nothing, if any sample was aborted."""
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
