"""Facts that an engine's parts are given about each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.build import apart, chunk_of, drafts_on_stage, slowed
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import resolve_options
from penstock.estimates.times import TAKEN
from penstock.hosts.facts import usable_cores


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (("", ""), set()),
        (("a", "b"), {-1, 0, 1}),
        (("", "a", "a"), {0, 2}),
        (("a", "a", ""), {-1, 1}),
    ],
)
def test_hops_between_hosts(hosts: tuple[str, ...], expected: set[int]) -> None:
    """The engine, at both ends, is on the host without a name."""
    assert apart(hosts) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 128),
        ({"device": "cuda"}, 512),
        ({"device": "cuda:1"}, 512),
        ({"device": "cuda", "prefill_chunk": 40}, 40),
        ({"prefill_chunk": 40}, 40),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_pieces_of_a_prompt_whose_times_are_unknown(options: dict[str, Any], expected: int) -> None:
    assert chunk_of(EngineOptions(**options)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pipeline_parallel_size": 2}, TAKEN),
        ({"cluster": "local-2"}, TAKEN),
        ({"cluster": "demo"}, 0.0),
        ({"cluster": "pipedec-14x3090"}, 0.0),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_stages_of_this_host_take_turns_at_first_and_modelled_ones_do_not(
    options: dict[str, Any], expected: float
) -> None:
    """Modelled devices take their own times, however many of them compute."""
    assert slowed(resolve_options(EngineOptions(**options))) == expected


@pytest.mark.parametrize(
    ("hosts", "devices", "expected"),
    [
        (("", ""), ("cuda:0", "cuda:1", "cuda:0"), 0.0),
        (("", ""), ("cuda:0", "cuda:0", "cuda:1"), TAKEN),
        (("", "", ""), ("cuda:0", "cuda:0", "cuda:1", "cuda:1"), TAKEN),
        (("", "a"), ("cuda:0", "cuda:0", "cuda:0"), 0.0),
        (("a", "b"), ("cpu", "cpu", "cpu"), TAKEN),
        (("",), ("cuda:0", "cuda:0"), 0.0),
    ],
    ids=["own", "shared", "two-of-three", "two-hosts", "processors", "one"],
)
def test_stages_that_share_a_gpu_take_turns_at_first(
    hosts: tuple[str, ...], devices: tuple[str, ...], expected: float
) -> None:
    """The last device is the drafter's, which is no stage."""
    setup = resolve_options(EngineOptions(pipeline_parallel_size=len(hosts), speculative_config=None))
    assert slowed(replace(setup, hosts=hosts, devices=devices)) == expected


CORES = usable_cores()


@pytest.mark.parametrize(
    ("hosts", "devices", "threads", "expected"),
    [
        (("",), ("cuda:0", "cuda:0"), (1, 1), True),
        (("",), ("cuda:0", "cuda:1"), (1, 1), False),
        (("a",), ("cuda:0", "cuda:0"), (1, 1), False),
        (("", ""), ("cuda:0", "cuda:1", "cuda:1"), (1, 1, 1), False),
        (("",), ("cpu", "cpu"), (CORES, 1), True),
        (("",), ("cpu", "cpu"), (CORES - 1, 1), False),
        (("", ""), ("cpu", "cpu", "cpu"), (CORES, CORES, 1), False),
    ],
    ids=["one-gpu", "two-gpus", "drafter-elsewhere", "two-stages", "too-few-cores", "enough-cores", "two-cpu-stages"],
)
def test_a_drafter_is_known_to_compute_on_the_only_stages_device(
    hosts: tuple[str, ...], devices: tuple[str, ...], threads: tuple[int, ...], expected: bool
) -> None:
    options = EngineOptions(
        model="demo", pipeline_parallel_size=len(hosts), speculative_config={"method": "draft_model"}
    )
    setup = replace(resolve_options(options), hosts=hosts, devices=devices, threads=threads)
    assert drafts_on_stage(setup) is expected


@pytest.mark.parametrize(
    "options", [{"cluster": "demo"}, {"speculative_config": {"method": "ngram"}}], ids=["modelled", "no-weights"]
)
def test_no_weights_and_no_modelled_device_draft_on_a_real_stages_device(options: dict[str, Any]) -> None:
    assert not drafts_on_stage(resolve_options(EngineOptions(model="demo", **options)))
