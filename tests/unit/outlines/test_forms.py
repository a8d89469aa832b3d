"""Questions whose words show that their answers are no lists."""

from __future__ import annotations

import pytest

from penstock.outlines.steps import OWN_TEXT, form_seen, guide_for


@pytest.mark.parametrize(
    "question",
    [
        "Write a function that finds the majority element.",
        "What does this do?\n```\nx = 1\n```",
        "How do I sort a vector in C++?",
        "Schreibe ein Programm, das Wörter zählt.",
        "Escribe el código que ordena una lista.",
        "Écris une fonction qui compte les mots.",
        "请写一个函数来计算平均值。",
    ],
)
def test_code_is_seen(question: str) -> None:
    found = form_seen(question, guide_for(question))
    assert found is not None
    assert found[0] == "code"
    assert "speaks of code" in found[1]


@pytest.mark.parametrize(
    "question", ["What are the advantages of working from home?", "¿Cómo puedo dormir mejor?", "睡眠有什么好处？"]
)
def test_other_questions_are_left_to_the_target(question: str) -> None:
    assert form_seen(question, guide_for(question)) is None


def test_a_question_with_a_text_of_its_own_is_about_that() -> None:
    text = "word " * OWN_TEXT
    assert form_seen(text, guide_for(text)) is None
    assert form_seen(f"Summarize: {text}", guide_for(text)) == (
        "text",
        f"the question brings a text of its own: it has {OWN_TEXT + 1} words",
    )
