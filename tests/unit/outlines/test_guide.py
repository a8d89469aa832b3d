"""Guides: every language has all that the others have, and its questions are told from others'."""

from __future__ import annotations

import pytest

from penstock.outlines.steps import KINDS, guide_for, guides


@pytest.mark.parametrize("language", guides())
def test_a_guide_is_complete(language: str) -> None:
    guide = guides()[language]
    assert set(guide.labels) == set(guide.samples) == set(KINDS)
    assert len({label[0] for label in guide.labels.values()}) == len(KINDS), "one token tells them apart"
    assert len({len(questions) for questions in guide.samples.values()}) == 1, "as many of one form as of another"
    assert all(f"{guide.opening} {label}" in guide.decide for label in guide.labels.values())
    assert not any(question in guide.decide for questions in guide.samples.values() for question in questions)
    asked = guide.point.format(number=2, title="Water")
    assert "2" in asked
    assert "Water" in asked


@pytest.mark.parametrize("language", guides())
def test_a_question_has_its_languages_guide(language: str) -> None:
    questions = [question for some in guides()[language].samples.values() for question in some]
    assert [guide_for(question).language for question in questions] == [language] * len(questions)


def test_a_question_in_no_language_that_there_is_has_the_english_one() -> None:
    assert guide_for("Ὁ βίος βραχύς").language == guide_for("").language == "en"
