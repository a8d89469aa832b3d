"""The cost models of other systems against arithmetic done by hand."""

from __future__ import annotations

import pytest

from penstock.cluster import PRICES
from penstock.cluster.spec import Device, Link
from penstock.lab.plan import METHODS, Group, sequence_s

MODEL = PRICES["llama-2-7b-4bit"]
LINK = Link(bandwidth_gbit_s=0.094, latency_ms=0.2)


def board(name: str, speed: float = 1.0, memory_gb: float = 8) -> Device:
    return Device(
        name=name,
        memory_gb=memory_gb,
        weight_bandwidth_gb_s=8.3 * speed,
        compute_tflops=0.35 * speed,
        overhead_ms=2,
    )


def group(*devices: Device, rings: bool = False, model: str = "llama-2-7b-4bit") -> Group:
    return Group(devices=devices, model=PRICES[model], link=LINK, rings=rings, kv_slots=512)


FOUR = tuple(board(f"nx-{i}") for i in range(4))


def test_what_is_exchanged_is_the_papers_table_1() -> None:
    """2 L S H and 4 L S H elements of 2 bytes: 136 and 273 MB for 260 tokens."""
    row = 32 * 4096 * 2 * 8 / 0.094e9
    for name, elements in (("SP", 2), ("M-LM", 4), ("DT", 2), ("Galaxy", 4)):
        assert group(*FOUR).exchanging_s(METHODS[name], 260) == pytest.approx(260 * elements * row)
    ring = group(*FOUR, rings=True).exchanging_s(METHODS["M-LM"], 1)
    assert ring == pytest.approx(0.75 * 4 * row + 4 * 3 * 32 * 0.0002)
    assert group(FOUR[0]).exchanging_s(METHODS["M-LM"], 260) == 0, "nobody to exchange with"


def test_a_shard_reads_its_share_and_a_replica_all() -> None:
    weights = MODEL.weight_bytes(range(32), head=True) / 8.3e9
    cache = MODEL.slot_bytes(range(32)) / 8.3e9
    token = group(*FOUR).pass_times(METHODS["M-LM"], 1, 0)
    assert token.computing == pytest.approx(0.002 + (weights + cache) / 4)
    assert token.total == token.computing + token.exchanging
    alone = group(*FOUR).pass_times(METHODS["SP"], 1, 0)
    assert alone == (pytest.approx(0.002 + weights + cache), 0.0, False), "a token is decoded on one device"
    prompt = [group(*FOUR).pass_times(METHODS[name], 260, 0).computing for name in ("SP", "M-LM")]
    assert prompt[0] == pytest.approx(prompt[1]), "many rows take as long to compute either way"


def test_galaxy_exchanges_while_it_computes() -> None:
    times = group(*FOUR).pass_times(METHODS["Galaxy"], 260, 0)
    assert times.total == max(times.computing, times.exchanging)


def test_galaxy_alone_gives_unequal_boards_shares_by_speed() -> None:
    """On two boards, one three times as fast: Galaxy's take as long as two of the mean speed, equal shares twice that.

    The others wait for the slow board's half, and its fixed 2 ms are the same everywhere.
    """
    unequal = group(board("fast", 3), board("slow", 1))
    equal = group(board("a", 2), board("b", 2))
    for name, method in METHODS.items():
        found, even = (one.pass_times(method, 64, 0).computing - 0.002 for one in (unequal, equal))
        assert found == pytest.approx(even * (1 if name == "Galaxy" else 2))


def test_whose_memory_does_not_suffice() -> None:
    boards = (board("nx"), board("nano", memory_gb=4))
    assert group(*boards).lacking(METHODS["SP"]) == ["nano"]
    assert group(*boards).lacking(METHODS["M-LM"]) == []
    assert len(group(*FOUR, model="llama-2-13b-4bit").lacking(METHODS["SP"])) == 4, "7.8 GB of 7.2"
    held = group(*FOUR).held(METHODS["M-LM"], 0)
    assert held.weights == pytest.approx((MODEL.weight_bytes(range(32), head=True)) / 4 + MODEL.embedding_bytes)


def test_a_sequence_is_its_prompt_and_its_tokens_one_by_one() -> None:
    prompt, tokens = sequence_s(group(*FOUR), METHODS["DT"], 100, 3)
    each = [group(*FOUR).pass_times(METHODS["DT"], 1, 100 + i).total for i in range(3)]
    assert prompt == group(*FOUR).pass_times(METHODS["DT"], 100, 0).total
    assert tokens == pytest.approx(sum(each))
