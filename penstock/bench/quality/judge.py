"""A model as the judge of answers, which rates each alone and compares two in both orders.

Source: Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena" (2023), section 3: single answer grading
and pairwise comparison, the latter in both orders because judges favour a position.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import httpx

from penstock.clients.api import Server, ServerError, first_model, refused

VERDICT_TOKENS: Final = 512
LOWEST, HIGHEST = 1.0, 10.0
RATING: Final = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
CHOICE: Final = re.compile(r"\[\[\s*([ABC])\s*\]\]")
RATE: Final = f"""You grade answers. Below are a user's question and an assistant's answer to it.
Consider whether the answer is helpful, relevant, correct, thorough and clear. A longer answer is not better by itself.
First give your reasons in a few sentences. Then write your grade, a number from {LOWEST:.0f} (useless) to \
{HIGHEST:.0f} (excellent), in double square brackets, like this: [[5]]."""
COMPARE: Final = """You compare answers. Below are a user's question and the answers of two assistants, A and B.
Consider which one is more helpful, relevant, correct, thorough and clear. Neither the order of the answers nor their
length may count.
First give your reasons in a few sentences. Then write your verdict in double square brackets: [[A]] if A is better, \
[[B]] if B is better, [[C]] if neither is."""


class Preferred(StrEnum):
    """The better of two answers. Where a judge's two orders disagree neither wins."""

    PLAIN = "plain"
    POINTS = "points"
    NEITHER = "neither"


@dataclass(frozen=True)
class Verdicts:
    """The judge's ratings and choice for one question; None where its reply holds no verdict."""

    plain: float | None
    points: float | None
    preferred: Preferred | None


class Judge:
    """A model behind a server, which rates and compares answers."""

    def __init__(self, server: Server, model: str | None) -> None:
        self._server = server
        self._http = httpx.Client(**server.client_options)
        self._model = model

    @property
    def model(self) -> str:
        """The model's name. Raises ServerError where no server answers, or where it names no model."""
        if self._model is None:
            self._model = first_model(self._sent("GET", "/models"))
        return self._model

    def verdicts(self, question: str, plain: str, points: str) -> Verdicts:
        """The verdicts on both answers to a question. Raises ServerError."""
        return Verdicts(
            self.rating(question, plain), self.rating(question, points), self.choice(question, plain, points)
        )

    def rating(self, question: str, answer: str) -> float | None:
        return rating_in(self._reply(RATE, {"Question": question, "Answer": answer}))

    def choice(self, question: str, plain: str, points: str) -> Preferred | None:
        first = choice_in(self._reply(COMPARE, {"Question": question, "Answer of A": plain, "Answer of B": points}))
        second = choice_in(self._reply(COMPARE, {"Question": question, "Answer of A": points, "Answer of B": plain}))
        return agreed(first, second)

    def _reply(self, task: str, parts: dict[str, str]) -> str:
        asked = "\n\n".join(f"### {title}\n{text}" for title, text in parts.items())
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": task}, {"role": "user", "content": asked}],
            "temperature": 0,
            "max_tokens": VERDICT_TOKENS,
        }
        try:
            content: Any = self._sent("POST", "/chat/completions", body).json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError("no answer", f"the judge's reply cannot be read: {error}") from error
        return content if isinstance(content, str) else ""

    def _sent(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            kind = type(error).__name__
            raise ServerError(kind, f"judge: nobody answers at {self._server.shown} ({error or kind})") from error
        if not response.is_success:
            raise refused(response)
        return response

    def close(self) -> None:
        self._http.close()


def rating_in(reply: str) -> float | None:
    """The last grade in a reply; None if there is none or it is out of range."""
    found = RATING.findall(reply)
    rating = float(found[-1]) if found else None
    return rating if rating is not None and LOWEST <= rating <= HIGHEST else None


def choice_in(reply: str) -> str | None:
    found = CHOICE.findall(reply)
    return found[-1] if found else None


def agreed(first: str | None, second: str | None) -> Preferred | None:
    """The choice from two verdicts, the first with the plain answer as A, the second with it as B."""
    if first is None or second is None:
        return None
    if (first, second) == ("A", "B"):
        return Preferred.PLAIN
    return Preferred.POINTS if (first, second) == ("B", "A") else Preferred.NEITHER
