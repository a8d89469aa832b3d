"""One choice's text as it comes in; what was thought, said and called as it comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.server.openai.tools.choice import ReplyPlan
from penstock.server.openai.tools.json_calls import Call
from penstock.server.openai.tools.readers import ParsedDelta


@dataclass(frozen=True)
class ToolCallDelta:
    """What is new of a choice's ``index``-th call. The first part of each has its id and its name, others neither."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ReplyDelta:
    """What is new of a choice, its calls numbered."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ReplyStream:
    """Reads one choice as its ``ReplyPlan`` says."""

    def __init__(self, plan: ReplyPlan) -> None:
        self.calls = 0
        """How many there have been, passed on or not."""
        self._reader = plan.reader()
        self._format = plan.format
        self._single = plan.single

    def push(self, text: str, ended: bool) -> ReplyDelta:
        """What ``text`` adds; with ``ended`` also what was held back."""
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
