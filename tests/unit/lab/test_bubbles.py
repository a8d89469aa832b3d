"""Why stages were idle: exact on traces drawn by hand, and a partition of the idle time on random ones.

Times are nanoseconds. ``trip(submitted, (received, start, end), ..., arrived=...)`` is one batch over the stages.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from penstock.lab.trace import Bubbles, Cause, Gap, Trace, Turn, read_trace
from penstock.lab.trace_summary import busy_time, summarise
from tests.unit.trace.runs import Run, drawn, trip


def causes(trace: Trace, stage: int) -> list[tuple[int, int, dict[str, int]]]:
    """Every gap of a stage: from, up to, nanoseconds by cause."""
    return [
        (gap.start, gap.end, {str(cause): time for cause, time in gap.causes.items() if time})
        for gap in Bubbles(trace).gaps(stage)
    ]


def test_plain_decoding_waits_for_every_result_and_for_the_links_on_its_way() -> None:
    trace = drawn(
        trip(0, (2, 2, 12), (15, 15, 25), arrived=30, after="request"),
        trip(30, (32, 32, 42), (45, 45, 55), arrived=60),
    )
    assert causes(trace, 0) == [
        (0, 2, {"cold start": 2}),
        (12, 32, {"nothing to enter": 10, "link": 10}),  # 12-15, 25-30 and 30-32 on links, 15-25 in stage 1
        (42, 60, {"end": 18}),
    ]
    assert causes(trace, 1) == [
        (0, 15, {"cold start": 15}),
        (25, 45, {"nothing to enter": 10, "link": 10}),  # 32-42 in stage 0 is charged to 15-25
        (55, 60, {"end": 5}),
    ]


def late(after: str, rounds: list[tuple[int, int]]) -> dict[str, int]:
    """The gap between two batches of 10 on one stage: the second enters 8 after the first one's end."""
    trace = drawn(
        trip(0, (0, 0, 10), arrived=10, after="request"), trip(18, (18, 18, 28), arrived=28, after=after), rounds=rounds
    )
    return causes(trace, 0)[0][2]


def test_a_drafter_is_late_where_its_answer_let_the_batch_in() -> None:
    assert late("draft", [(5, 18)]) == {"drafter late": 8}
    assert late("draft", [(10, 13), (13, 18)]) == {"drafter late": 8}
    assert late("draft", [(12, 18)]) == {"nothing to enter": 2, "drafter late": 6}


def test_a_drafter_is_late_where_its_answer_had_not_come() -> None:
    assert late("result", [(12, 40)]) == {"nothing to enter": 2, "drafter late": 6}


def test_a_drafter_is_not_late_where_its_answer_let_nothing_in() -> None:
    assert late("result", [(8, 14)]) == {"nothing to enter": 8}


def test_what_entered_as_soon_as_it_could_waited_for_the_word_of_that() -> None:
    assert late("ready", [(5, 18)]) == {"link": 8}
    far = drawn(
        trip(0, (5, 5, 10), arrived=10, after="request"),
        trip(18, (23, 23, 28), arrived=28, after="draft"),
        rounds=[(0, 18)],
    )
    assert causes(far, 0)[1][2] == {"drafter late": 8, "link": 5}, "Ready needs 5, as the batch did: until 10"
    busy = drawn(
        trip(0, (5, 5, 10), arrived=10, after="request"),
        trip(18, (23, 23, 28), arrived=28, after="draft"),
        rounds=[(16, 18)],
    )
    assert causes(busy, 0)[1][2] == {"nothing to enter": 6, "drafter late": 2, "link": 5}


def test_after_a_miss_the_stages_behind_wait_for_the_new_root() -> None:
    batches = (
        trip(0, (0, 0, 10), (10, 10, 20), (20, 20, 30), arrived=30, after="request"),
        trip(30, (30, 30, 40), (40, 40, 50), (50, 50, 60), arrived=60, nodes=[7, 8]),
    )
    hit, miss = drawn(*batches), drawn(*batches, missed=[8])
    assert causes(hit, 2)[1] == (30, 50, {"nothing to enter": 20})
    assert causes(miss, 2)[1] == (30, 50, {"refill after a miss": 20})
    assert causes(miss, 0)[0] == (10, 30, {"nothing to enter": 20}), "before the miss was known"


def test_batches_that_lost_all_their_rows_count_as_a_refill() -> None:
    trace = drawn(
        trip(0, (0, 0, 10), (10, 10, 20), arrived=20, after="request"),
        trip(0, (0, 10, 20), (20, 20, 20, 0), arrived=20, after="ready"),
        trip(10, (10, 20, 30), (30, 30, 40), arrived=40, after="ready"),
    )
    assert causes(trace, 1)[1] == (20, 30, {"refill after a miss": 10})
    assert causes(trace, 0) == [(30, 40, {"end": 10})]


def test_a_faster_stage_waits_for_the_one_before_it() -> None:
    trace = drawn(
        trip(0, (0, 0, 10), (10, 10, 14), arrived=14, after="request"),
        trip(1, (1, 10, 20), (20, 20, 24), arrived=24, after="ready"),
    )
    assert causes(trace, 1)[1] == (14, 20, {"upstream busy": 6})


def test_an_entrance_that_stood_free_beside_a_busy_first_stage_cost_nothing() -> None:
    """Had the second batch come at once, it would have waited in the first stage's buffer."""
    trace = drawn(
        trip(0, (0, 0, 10), (10, 10, 14), arrived=14, after="request"),
        trip(8, (8, 10, 20), (20, 20, 24), arrived=24, after="draft"),
        rounds=[(0, 8)],
    )
    assert causes(trace, 1)[1] == (14, 20, {"upstream busy": 6})


def test_a_late_entry_is_charged_on_every_stage_and_the_rest_is_the_slower_stages() -> None:
    """The picture in the module's docstring: a wait of 4, then a stage that is faster by 2."""
    trace = drawn(
        trip(0, (0, 0, 8), (8, 8, 16), (16, 16, 22), arrived=22, after="request"),
        trip(12, (12, 12, 20), (20, 20, 28), (28, 28, 34), arrived=34, after="draft"),
        rounds=[(0, 12)],
    )
    assert causes(trace, 0)[0] == (8, 12, {"drafter late": 4})
    assert causes(trace, 1)[1] == (16, 20, {"drafter late": 4})
    assert causes(trace, 2)[1] == (22, 28, {"drafter late": 4, "upstream busy": 2})


def test_a_finished_batch_waits_for_the_next_stages_buffer() -> None:
    trace = drawn(
        trip(0, (0, 0, 10), (10, 10, 40), arrived=40, after="request"),
        trip(0, (0, 10, 20), (20, 40, 70), arrived=70, after="ready"),
        trip(10, (10, 20, 30), (42, 70, 100), arrived=100, after="ready"),
        trip(20, (20, 41, 51), (71, 100, 130), arrived=130, after="ready"),
    )
    assert causes(trace, 0)[0] == (30, 41, {"downstream busy": 10, "link": 1}), "Ready comes a little later"


@pytest.mark.parametrize(
    ("after", "arrived", "expected"),
    [
        ("ready", 24, {"downstream busy": 4, "link": 2}),
        ("draft", 24, {"downstream busy": 4, "drafter late": 2}),
        ("result", 16, {"nothing to enter": 6}),
        ("result", 11, {"drafter late": 1 + 2, "downstream busy": 3}),
    ],
)
def test_a_batch_may_be_held_back_for_the_slowest_stage(after: str, arrived: int, expected: dict[str, int]) -> None:
    """The second stage takes 14, the first 10: a batch that enters before 14 only waits. What let it in is no wait."""
    trace = drawn(
        trip(-20, (-20, -20, -10), (-10, -10, arrived), arrived=arrived, after="request"),
        trip(0, (0, 0, 10), (10, 10, 24), arrived=24, after="ready"),
        trip(16, (16, 16, 26), (26, 26, 40), arrived=40, after=after),
        rounds=[(0, 16)] if after == "draft" else [(0, 20)] if arrived == 11 else [],
    )
    assert causes(trace, 0)[1] == (10, 16, expected)


def test_without_a_commit_the_run_ends_with_the_last_result() -> None:
    one = trip(0, (0, 0, 10), arrived=12, after="request")
    trace = Trace("t", ["stage 0"], [one], [], [], frozenset())
    assert causes(trace, 0) == [(10, 12, {"end": 2})]
    assert summarise(trace).tokens == 0


def test_what_comes_after_the_last_commit_is_left_out() -> None:
    trace = drawn(
        trip(0, (0, 0, 10), arrived=10, after="request"), trip(20, (20, 20, 40), arrived=40, after="draft"), end=30
    )
    assert causes(trace, 0) == [(10, 20, {"nothing to enter": 10})]
    early = drawn(
        trip(0, (0, 0, 10), arrived=10, after="request"), trip(20, (20, 20, 40), arrived=40, after="draft"), end=15
    )
    assert causes(early, 0) == [(10, 15, {"end": 5})]


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(20, 60))])
def test_the_causes_of_every_gap_add_up_to_it_and_the_gaps_to_the_idle_time(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(Run(seed).text)
    trace = read_trace(file)
    bubbles = Bubbles(trace)
    for stage in range(len(trace.stages)):
        gaps = list(bubbles.gaps(stage))
        check_gaps(gaps)
        visits = [one.visits[stage] for one in trace.trips]
        assert sum(gap.end - gap.start for gap in gaps) == trace.end - trace.begin - busy_time(trace, visits)


def check_gaps(gaps: list[Gap]) -> None:
    for gap, after in pairwise(gaps):
        assert gap.end <= after.start
    for gap in gaps:
        assert gap.start < gap.end
        assert sum(gap.causes.values()) == gap.end - gap.start
        assert min(gap.causes.values()) >= 0
        assert set(gap.causes) <= set(Cause)


def test_a_batch_waits_while_the_drafter_has_the_stages_device() -> None:
    """Only while it is there: before, it was on its way. The other stage's device is its own."""
    trace = drawn(
        trip(0, (0, 0, 10), (10, 10, 20), arrived=20, after="request"),
        trip(10, (10, 10, 20), (25, 31, 41), arrived=41, after="ready"),
        turns=[Turn(1, 22, 31), Turn(0, 41, 42)],
    )
    assert causes(trace, 1)[1] == (20, 31, {"link": 5, "drafter's turn": 6})
