"""Answers in points, simulated: an outline token by token, then points that share the pipeline."""

from __future__ import annotations

import pytest

from benchmarks.papers.jupiter import HEADS, all_heads_at_once, cluster_of, decoding_s, papers_cluster
from benchmarks.shared.points import TITLE, Answer, answered
from penstock.cluster import load_cluster
from penstock.lab.grid import parse_entries
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import simulate

ACCURACY = (0.6, 0.72)
PROMPT = 64


def test_points_take_turns_where_a_plain_answer_leaves_boards_idle() -> None:
    cluster = load_cluster("jupiter-homogeneous")
    answer = Answer(prompt=PROMPT, points=4, tokens=16)

    def script_of(requests: int, tokens: int, seed: int, prompt: int) -> Script:
        return profile_script(ACCURACY, requests, tokens, seed, prompt=prompt)

    found = answered(cluster, answer, script_of, None, seed=0)
    (plain,) = simulate(cluster, profile_script(ACCURACY, 1, 65, 0, prompt=PROMPT), None)
    token_s = plain.seconds / 64
    assert found.outline_s == pytest.approx((4 * TITLE - 1) * token_s, rel=0.01)
    points_s = found.seconds - found.outline_s
    assert points_s > 16 * token_s, "the tokens of a point follow each other"
    assert points_s < 2 * 16 * token_s, "beside those of the others, and only their own prompts are computed"


def test_jupiters_heads_are_asked_in_one_pass() -> None:
    """Five depths take the reading of five heads and one overhead, where the engine's drafter has five overheads."""
    paper = papers_cluster(cluster_of("A", "1 Gbps", "7B"))
    assert paper is not None
    assert [sum(stage.layers) for stage in paper.stages] == [8, 8, 8, 8]
    at_once = all_heads_at_once(paper)
    before, after = (next(one for one in some.devices if one.name == some.drafter) for some in (paper, at_once))
    assert after.overhead_ms == pytest.approx(before.overhead_ms / HEADS)
    assert [one for one in at_once.devices if one.name != at_once.drafter] == [
        one for one in paper.devices if one.name != paper.drafter
    ]
    ((_, chain),) = parse_entries(["static_tree[tree_size=5,tree_depth=5,children=1]"], {})
    assert decoding_s(at_once, chain, tokens=8) < decoding_s(paper, chain, tokens=8)
