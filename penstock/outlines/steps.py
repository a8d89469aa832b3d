"""An answer in points, step by step: the requests to the target, and what follows from its outputs.

    form (auto alone)        outline                    points
    one constrained token -> numbered titles, under  -> one request each, all at once: they share guide, question
                             a grammar                  and outline, and are put together in order

Where the form is no list, or the outline cannot be read, the last step is the plain answer.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Final

from penstock.core import OUTLINE_MODES, FinishReason, OutlineOutput, RequestError, RequestOutput, SamplingParams
from penstock.outlines.asks import Ask, Step, Steps
from penstock.outlines.dialogue import BETWEEN, Dialogue, Rendered
from penstock.outlines.forms import Forms, form_seen
from penstock.outlines.guide import Guide, guide_for
from penstock.outlines.outline import grammar, titles_of

OUTLINE_TOKENS: Final = 192
"""Most tokens of an outline, on top of ``max_tokens``."""
SHORT: Final = 48
"""Value of ``max_tokens`` below which an answer is a short one, whatever its form."""
LEAST: Final = 8
"""Fewest tokens that a point may be limited to."""


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
    """The steps of one answer. ``longest`` is the most tokens of prompt and output together."""

    def __init__(self, dialogue: Dialogue, params: SamplingParams, forms: Forms, longest: int) -> None:
        self._dialogue = dialogue
        self._params = params
        self._forms = forms
        self._longest = longest
        self._guide: Guide = guide_for(dialogue.question)
        self._report = OutlineOutput()

    def steps(self, mode: str) -> Steps:
        """The steps, of which the last is the answer. Raises RequestError for messages that the template refuses."""
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
        self._report.reason = reason or self._report.reason
        return Step([Ask("plain", self._dialogue.plain(), self._params)], self._report, last=True, headings=[""])
