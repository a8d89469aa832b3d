"""A judge as servers offer one, whose verdicts are known: it prefers answers in points, or a position."""

from __future__ import annotations

from typing import Any, Final

from tests.openai_server import OpenAIServer, Reply, prompt_of

POINTS: Final = "1. **"
"""How an answer in points begins."""
SECOND: Final = "### Answer of B\n"


def judge_server(prefers: str) -> OpenAIServer:
    """Start a judge that prefers a position's letter or "points"; alone, points get 7.5 and plain answers 4."""

    def verdict(asked: str) -> str:
        if SECOND not in asked:
            return "7.5" if POINTS in asked else "4"
        if prefers != "points":
            return prefers
        return "B" if POINTS in asked.split(SECOND)[1] else "A"

    def answer(body: dict[str, Any]) -> Reply:
        return Reply(("It could be [[C]] or [[1]]. ", f"[[{verdict(prompt_of(body))}]]"))

    return OpenAIServer(answer)
