"""The choice of a replica, their wanted number, and the sums of their reports, without Ray."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.replicas.router import USUAL_ANSWER
from penstock.ray_serve.policies import RequestsAndSlots, wanted
from penstock.ray_serve.routing import MOST_SENT, NOTHING, Known, Report, Reports, ranked
from penstock.requests.slots import BLOCK, PrefixCache, block_hashes
from penstock.tree import Node


def report(running: int = 0, waiting: int = 0, prompt: list[int] | None = None) -> Report:
    stats = replace(NOTHING, running=running, waiting=waiting)
    return Report(stats, frozenset(block_hashes(prompt or [])))


def known(*reports: Report | None) -> dict[str, Known]:
    return {str(number): Known(report) for number, report in enumerate(reports)}


PROMPT = list(range(10 * BLOCK))


def test_a_prefix_draws_its_requests() -> None:
    assert ranked(PROMPT, known(report(), report(prompt=PROMPT), None))[0] == "1"


def test_a_load_that_outweighs_the_prefix_sends_them_elsewhere() -> None:
    busy = len(PROMPT) // round(USUAL_ANSWER) + 1
    assert ranked(PROMPT, known(report(), report(running=busy, prompt=PROMPT)))[0] == "0"


def test_a_prefix_ends_at_the_first_block_that_is_missing() -> None:
    other = [*PROMPT[:BLOCK], 7, *PROMPT[BLOCK + 1 :]]  # the same tokens later on, but after another text
    one = Known(report(prompt=other))
    assert one.cached_tokens(list(block_hashes(PROMPT))) == BLOCK


def test_what_was_sent_counts_before_it_is_reported() -> None:
    replicas = known(report(), report())
    replicas["1"].note_sent(list(block_hashes(PROMPT)))
    assert ranked(PROMPT, replicas)[0] == "1"
    assert replicas["1"].load == 1
    replicas["1"].note_report(report(running=1))  # which has it, too
    assert replicas["1"].load == 1
    replicas["1"].note_ended()
    replicas["1"].note_report(report())
    assert replicas["1"].load == 0


def test_what_was_sent_is_bounded() -> None:
    one = Known()
    for first in range(0, 2 * MOST_SENT, 64):
        one.note_sent(range(first, first + 64))
    assert one.cached_tokens(range(MOST_SENT, 2 * MOST_SENT)) == MOST_SENT * BLOCK
    assert one.cached_tokens(range(1)) == 0


@given(st.lists(st.lists(st.integers(0, 3), min_size=BLOCK, max_size=4 * BLOCK), max_size=30), st.integers(2, 5))
def test_equal_replicas_get_equal_shares(prompts: list[list[int]], count: int) -> None:
    """Nobody has more than what a longest prompt is worth above another, whatever the prompts share."""
    replicas = {str(number): Known() for number in range(count)}
    sent: Counter[str] = Counter(dict.fromkeys(replicas, 0))
    for prompt in prompts:
        best = ranked(prompt, replicas)[0]
        replicas[best].note_sent(list(block_hashes(prompt)))
        sent[best] += 1
    assert max(sent.values()) - min(sent.values()) <= 4 * BLOCK // round(USUAL_ANSWER) + 1


def test_the_cache_names_its_blocks_as_a_router_does() -> None:
    cache, before = PrefixCache(), None
    tokens = list(range(3 * BLOCK))
    for first in range(0, len(tokens), BLOCK):
        nodes = [Node(place, tokens[place], place, place) for place in range(first, first + BLOCK)]
        before = cache.add(before, nodes)
    assert sorted(cache.hashes(99)) == sorted(block_hashes([*tokens, 0]))
    assert cache.hashes(1) == [list(block_hashes([*tokens, 0]))[-1]]


def test_the_sum_of_reports_keeps_what_replicas_that_ended_have_counted() -> None:
    reports = Reports()
    first = Report(replace(NOTHING, running=2, generation_tokens=10, finished={"stop": 1}, stage_busy_seconds=[1.0]))
    second = Report(replace(NOTHING, running=1, generation_tokens=5, finished={"stop": 2, "length": 1}))
    assert reports.summed().resting
    reports.update({"a": first, "b": None})
    reports.update({"a": first, "b": second})
    reports.update({"a": None, "b": second})  # a report that is missing once is no end
    assert (reports.summed().running, reports.summed().generation_tokens) == (3, 15)
    reports.update({"b": second})
    found = reports.summed()
    assert (found.running, found.generation_tokens, found.finished) == (1, 15, {"stop": 3, "length": 1})
    assert found.stage_busy_seconds == []
    reports.update({})
    assert (reports.summed().running, reports.summed().generation_tokens, reports.summed().resting) == (0, 15, True)


def test_a_report_survives_serves_dictionary() -> None:
    one = report(running=3, prompt=PROMPT)
    assert Report.of(one.as_dict()) == one
    assert Report.of({}) is None


def test_replicas_are_wanted_for_requests_and_for_slots() -> None:
    assert wanted(0, [0.5], of_each=16, most_share=0.8) == 0  # what is cached alone needs none
    assert wanted(8, [0.1], of_each=16, most_share=0.8) == 0.5
    assert wanted(40, [0.1, 0.1], of_each=16, most_share=0.8) == 2.5
    assert wanted(4, [1.0, 0.6], of_each=16, most_share=0.8) == 2.0


def test_the_policy_reads_serves_context() -> None:
    class Context:
        total_num_requests = 3.0
        aggregated_metrics = {"kv_share": {"a": 0.9, "b": 0.9}, "waiting": {"a": 0.0}}  # noqa: RUF012

    assert RequestsAndSlots(requests=2, kv_share=0.6)(Context) == (3.0, {})
    Context.aggregated_metrics = {}
    assert RequestsAndSlots(requests=2, kv_share=0.6)(Context) == (1.5, {})
