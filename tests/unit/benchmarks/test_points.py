"""Answers in points, simulated: an outline token by token, then points that share the pipeline."""

from __future__ import annotations

import pytest

from benchmarks.shared.points import TITLE, Answer, answered
from penstock.cluster import load_cluster
from penstock.lab.simulator.run import simulate
from penstock.lab.simulator.script import profile_script

ACCURACY = (0.6, 0.72)
PROMPT = 64


def test_points_take_turns_where_a_plain_answer_leaves_boards_idle() -> None:
    cluster = load_cluster("jupiter-homogeneous")
    answer = Answer(prompt=PROMPT, points=4, tokens=16)
    found = answered(cluster, answer, ACCURACY, None, seed=0)
    (plain,) = simulate(cluster, profile_script(ACCURACY, 1, 65, 0, prompt=PROMPT), None)
    token_s = plain.seconds / 64
    assert found.outline_s == pytest.approx((4 * TITLE - 1) * token_s, rel=0.01)
    points_s = found.seconds - found.outline_s
    assert points_s > 16 * token_s, "the tokens of a point follow each other"
    assert points_s < 2 * 16 * token_s, "beside those of the others, and only their own prompts are computed"
