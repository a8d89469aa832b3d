"""The stream of one choice: text goes in; reasoning, content and numbered calls come out."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.server.openai.tools.choice import ReplyPlan
from penstock.server.openai.tools.json_calls import Call
from penstock.server.openai.tools.readers import ParsedDelta


@dataclass(frozen=True)
class ToolCallDelta:
    """The new part of a choice's ``index``-th call. Only a call's first part has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ReplyDelta:
    """The new part of a choice, with numbered calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ReplyStream:
    """A choice's text, read by the reader of its ``ReplyPlan``."""

    def __init__(self, plan: ReplyPlan) -> None:
        self.calls = 0
        """Number of calls so far, passed on or not."""
        self._reader = plan.reader()
        self._format = plan.format
        self._single = plan.single

    def push(self, text: str, ended: bool) -> ReplyDelta:
        """The result of adding ``text``; with ``ended`` also of what was held back."""
        parsed = self._reader.push(text) if text else ParsedDelta()
        if ended:
            parsed += self._reader.finish()
        numbered = [self._numbered(call) for call in parsed.calls]
        calls = [call for call in numbered if call.index == 0 or not self._single]
        return ReplyDelta(parsed.content, parsed.reasoning, calls)

    def _numbered(self, call: Call) -> ToolCallDelta:
        if call.name:
            self.calls += 1
        return ToolCallDelta(self.calls - 1, self._format.new_id() if call.name else "", call.name, call.arguments)
