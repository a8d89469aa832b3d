"""Quality by category of question, over the questions that were answered in points."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import msgspec

from penstock.bench.formats import bounds, length
from penstock.bench.intervals import Ratio, paired_ratio
from penstock.bench.quality.answers import Answered
from penstock.bench.quality.judge import Preferred, Verdicts
from penstock.tables import FiguresTable

ALL = "all"


@dataclass(frozen=True)
class Compared:
    """A question's answers, their log-likelihoods per token in nats, and the judge's verdicts, if there is one."""

    answered: Answered
    plain_nats: float | None
    points_nats: float | None
    verdicts: Verdicts | None = None


@dataclass(frozen=True)
class CategoryQuality:
    """Figures of a category's questions; means are over those with both values, and None where there are none.

    ``perplexity`` is that of an answer in points over that of the plain one, by question. ``preferred`` counts the
    judge's choices, and ``unread`` its replies without any.
    """

    category: str
    questions: int
    in_points: int
    plain_nats: float | None
    points_nats: float | None
    perplexity: Ratio | None
    plain_rating: float | None
    points_rating: float | None
    preferred: dict[str, int]
    unread: int


def summarized(compared: Sequence[Compared]) -> list[CategoryQuality]:
    """The figures of each category in the order of the questions, followed by those of all questions."""
    categories = list(dict.fromkeys(one.answered.question.category for one in compared))
    of = {name: [one for one in compared if one.answered.question.category == name] for name in categories}
    return [category(name, some) for name, some in of.items()] + [category(ALL, compared)]


def category(name: str, compared: Sequence[Compared]) -> CategoryQuality:
    some = [one for one in compared if one.answered.points is not None]
    nats = both((one.plain_nats, one.points_nats) for one in some)
    verdicts = [one.verdicts for one in some if one.verdicts is not None]
    ratings = both((one.plain, one.points) for one in verdicts)
    chosen = Counter(one.preferred for one in verdicts)
    return CategoryQuality(
        category=name,
        questions=len(compared),
        in_points=len(some),
        plain_nats=mean([plain for plain, _ in nats]),
        points_nats=mean([points for _, points in nats]),
        perplexity=perplexities(nats),
        plain_rating=mean([plain for plain, _ in ratings]),
        points_rating=mean([points for _, points in ratings]),
        preferred={str(one): chosen[one] for one in Preferred},
        unread=chosen[None],
    )


def both(pairs: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def perplexities(nats: Sequence[tuple[float, float]]) -> Ratio | None:
    """The ratio of perplexities, points over plain."""
    return paired_ratio([math.exp(plain - points) for plain, points in nats])


def table_of(found: Sequence[CategoryQuality], judged: bool) -> FiguresTable:
    names = ["questions", "in points", "plain,\nnats/token", "points,\nnats/token", "perplexity,\npoints/plain", "95%"]
    if judged:
        names[2:2] = ["plain,\n1-10", "points,\n1-10", "prefers plain,\npoints, neither", "unread"]
    table = FiguresTable("category", *names)
    for one in found:
        cells = [
            str(one.questions),
            str(one.in_points),
            length(one.plain_nats),
            length(one.points_nats),
            length(None if one.perplexity is None else one.perplexity.mean),
            bounds(None if one.perplexity is None else one.perplexity.bounds),
        ]
        if judged:
            chosen = ", ".join(str(count) for count in one.preferred.values())
            cells[2:2] = [length(one.plain_rating), length(one.points_rating), chosen, str(one.unread)]
        table.add_row(one.category, *cells)
    return table


def as_json(settings: dict[str, Any], found: Sequence[CategoryQuality]) -> str:
    figures = {"settings": settings, "categories": [asdict(one) for one in found]}
    return msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"
