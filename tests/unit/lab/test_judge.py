"""A judge's replies, and what they come to."""

from __future__ import annotations

import pytest

from penstock.clients.api import Server, ServerError
from penstock.lab.quality import Judge, Preferred, Verdicts, agreed, choice_in, rating_in
from tests.judges import judge_server
from tests.openai_server import running

PLAIN, POINTS = "Water does.", "1. **Water**: It falls."


@pytest.mark.parametrize(
    ("prefers", "preferred"),
    [
        ("points", Preferred.POINTS),
        ("A", Preferred.NEITHER),  # a position, not an answer
        ("C", Preferred.NEITHER),
    ],
)
def test_both_orders_count(prefers: str, preferred: Preferred) -> None:
    with running(judge_server(prefers)) as server:
        judge = Judge(Server(url=server.url), None)
        assert judge.model == "scripted"
        found = judge.verdicts("What turns a water wheel?", PLAIN, POINTS)
        judge.close()
    assert found == Verdicts(4, 7.5, preferred)
    assert {body["temperature"] for body in server.bodies} == {0}
    contents = [body["messages"][-1]["content"] for body in server.bodies]
    assert all("What turns a water wheel?" in content for content in contents)
    assert len(contents) == 4
    assert contents[2].index(PLAIN) < contents[2].index(POINTS)
    assert contents[3].index(PLAIN) > contents[3].index(POINTS)


def test_the_last_verdict_of_a_reply_counts() -> None:
    assert rating_in("[[3]] would be harsh: [[ 7.5 ]]") == 7.5
    assert rating_in("I give it 7 of 10.") is None
    assert rating_in("[[11]]") is None
    assert rating_in("[[A]]") is None
    assert choice_in("Not [[A]]: [[B]].") == "B"
    assert choice_in("[[7]]") is None


def test_only_an_answer_that_wins_in_both_orders_is_preferred() -> None:
    assert agreed("A", "B") is Preferred.PLAIN
    assert agreed("B", "A") is Preferred.POINTS
    for first, second in ("AA", "BB", "AC", "CB", "CC"):
        assert agreed(first, second) is Preferred.NEITHER
    assert agreed(None, "A") is None
    assert agreed("A", None) is None


def test_a_judge_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerError, match=r"^judge: nobody answers at http://127\.0\.0\.1:9"):
        _ = Judge(Server(url="http://127.0.0.1:9"), None).model
