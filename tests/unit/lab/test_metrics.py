"""Figures from outcomes with known times."""

from __future__ import annotations

import pytest

from penstock.clients.api import Chunk, Usage
from penstock.lab.serving_load import Latency, Outcome, Speculation, is_good, latency_of, same_texts, summarize
from tests.unit.lab.outcomes import answered, failed, level


def test_times_of_one_request() -> None:
    one = answered(started=3.0, first=1.0, gap=0.5, chunks=3, usage=Usage(10, 6))
    assert one.ttft == pytest.approx(1.0)
    assert one.gaps == pytest.approx([0.5, 0.5])
    assert one.e2el == pytest.approx(1.0 + 2.5 * 0.5)  # until the finish reason, not until the usage
    assert one.tpot == pytest.approx(1.25 / 5)  # tokens, not chunks


def test_chunks_without_text_are_no_tokens() -> None:
    one = Outcome(0, 0.0)
    one.add(Chunk(), 1.0)
    one.add(Chunk("a"), 2.0)
    one.add(Chunk(), 3.0)
    one.add(Chunk("b"), 4.0)
    assert (one.ttft, one.gaps) == (2.0, [2.0])


def test_what_cannot_be_known_is_none() -> None:
    single, uncounted, silent = answered(usage=Usage(10, 1)), answered(usage=None), Outcome(0, 0.0)
    assert single.tpot is uncounted.tpot is None
    assert silent.ttft is silent.e2el is silent.tpot is None


def test_percentiles() -> None:
    found = latency_of([0.001 * i for i in range(101)])
    assert found is not None
    assert vars(found) == pytest.approx({"mean": 50.0, "median": 50.0, "p90": 90.0, "p99": 99.0})
    assert latency_of([]) is None


def test_a_level() -> None:
    one, other = answered(0), answered(1, first=3.0, usage=Usage(20, 3, cached_tokens=16))
    found = summarize(level(one, failed(2), other, failed(3), failed(4, "ReadTimeout"), asked=7, seconds=4.0), {})
    assert (found.completed, found.failed, found.unfinished) == (2, 3, 2)
    assert found.errors == {"HTTP 429": 2, "ReadTimeout": 1}
    assert found.finish_reasons == {"length": 2}
    assert (found.total_input_tokens, found.total_output_tokens, found.cached_tokens) == (30, 8, 16)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (0.5, 2.0, 9.5)
    assert found.latencies["ttft"] == Latency(2000.0, 2000.0, pytest.approx(2800.0), pytest.approx(2980.0))
    assert found.tokens_per_chunk == pytest.approx(8 / 6)
    assert found.request_goodput is None


def test_inter_token_latencies_are_of_all_gaps_and_others_of_all_requests() -> None:
    long, short = answered(gap=0.1, chunks=11), answered(gap=1.0, chunks=2)
    found = summarize(level(long, short), {}).latencies["itl"]
    assert found is not None
    assert found.mean == pytest.approx(1e3 * (10 * 0.1 + 1.0) / 11)


def test_tokens_are_never_guessed_from_chunks() -> None:
    found = summarize(level(answered(usage=None), answered(usage=Usage(10, 5))), {})
    assert (found.without_usage, found.total_output_tokens, found.completed) == (1, 5, 2)
    assert found.tokens_per_chunk == pytest.approx(5 / 3)


def test_a_level_in_which_nothing_succeeded() -> None:
    found = summarize(level(failed(), asked=3), {"ttft": 1.0})
    assert set(found.latencies.values()) == {None}
    assert (found.request_throughput, found.request_goodput, found.tokens_per_chunk) == (0, 0, None)
    assert found.as_dict()["p99_ttft_ms"] is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"ttft": 1000}, True), ({"ttft": 999}, False), ({"ttft": 1000, "e2el": 2249}, False), ({"tpot": 312.5}, True)],
)
def test_goodput_wants_all_limits_kept(limits: dict[str, float], good: bool) -> None:
    assert is_good(answered(), limits) is good


def test_goodput_counts_requests_per_second() -> None:
    found = summarize(level(answered(), answered(first=5.0), failed(), seconds=2.0), {"ttft": 1000})
    assert found.request_goodput == 0.5


def test_speculation_is_the_servers_counters_else_the_usages() -> None:
    both = level(answered(usage=Usage(10, 5, accepted=3, rejected=1)), answered(usage=Usage(10, 5)))
    assert summarize(both, {}).speculation == Speculation(None, 4, 3)
    both.counted = Speculation(2, 8, 4)
    assert summarize(both, {}).speculation == Speculation(2, 8, 4)
    assert summarize(level(answered()), {}).speculation is None


def test_flat_names_are_vllms() -> None:
    found = summarize(level(answered()), {}).as_dict()
    assert {"mean_ttft_ms", "median_tpot_ms", "p90_itl_ms", "p99_e2el_ms", "output_throughput"} <= found.keys()
    assert found["mean_ttft_ms"] == pytest.approx(1000.0)


def test_texts_are_compared_request_by_request() -> None:
    first = level(answered(0, text="a"), answered(1, text="b"), failed(2))
    second = level(answered(1, text="b"), answered(0, text="c"), answered(2, text="d"))
    assert same_texts(second, first) == (1, 2)
