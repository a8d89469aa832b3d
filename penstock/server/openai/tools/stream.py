"""One choice's text as it comes in; its content and its numbered tool calls as they come out."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.openai.tools.choice import ToolPlan
from penstock.server.openai.tools.formats import Call
from penstock.server.openai.tools.readers import ParsedDelta


@dataclass(frozen=True)
class ToolCallDelta:
    """What is new of a choice's ``index``-th call. The first part of each has its id and its name, others neither."""

    index: int
    id: str
    name: str
    arguments: str


class ToolStream:
    """Reads the calls of one choice as its ``ToolPlan`` says."""

    def __init__(self, plan: ToolPlan) -> None:
        self.calls = 0
        """How many there have been, passed on or not."""
        self._reader = plan.reader()
        self._format = plan.format
        self._single = plan.single

    def push(self, text: str, ended: bool) -> tuple[str, list[ToolCallDelta]]:
        """The content and the calls that ``text`` adds; with ``ended`` also what was held back."""
        parsed = self._reader.push(text) if text else ParsedDelta()
        if ended:
            rest = self._reader.finish()
            parsed = ParsedDelta(parsed.content + rest.content, parsed.calls + rest.calls)
        numbered = [self._numbered(call) for call in parsed.calls]
        return parsed.content, [call for call in numbered if call.index == 0 or not self._single]

    def _numbered(self, call: Call) -> ToolCallDelta:
        self.calls += bool(call.name)
        return ToolCallDelta(self.calls - 1, self._format.new_id() if call.name else "", call.name, call.arguments)
