"""Where stages go when hosts are lost: the same stages on other hosts, or all layers split anew."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.core import ConfigError
from penstock.engine.build import stage_plans
from penstock.engine.options import EngineOptions
from penstock.engine.parts import names_there, placements, same_split, split_anew
from penstock.engine.profile.measure import needed_by_rank, needed_bytes
from penstock.engine.resolve import Resolved, resolve_options
from penstock.hosts.facts import DeviceFacts, HostFacts, own_facts


def host(free: int) -> HostFacts:
    own = own_facts("")
    processor = msgspec.structs.replace(own.devices[0], free=free, memory=max(free, own.devices[0].memory))
    return msgspec.structs.replace(own, devices=(processor,))


def fleet(**free: int) -> dict[str, HostFacts]:
    """A fleet whose hosts have this many bytes free."""
    return {name: host(bytes_free) for name, bytes_free in free.items()}


def asked(hosts: str = "a,b,c", **options: Any) -> Resolved:
    plenty = fleet(a=1 << 40, b=1 << 40, c=1 << 40)
    return resolve_options(EngineOptions(model="demo", hosts=hosts, kv_slots=1000, **options), plenty)


def test_stages_are_split_evenly_where_one_fits_nowhere_as_it_is() -> None:
    """Two of three hosts are left. A third stage has no room beside another one."""
    setup = asked()
    room = max(needed_bytes(setup))
    with pytest.raises(ConfigError, match="none of the hosts that are there has room for stage"):
        same_split(setup, ["a", "b"], fleet(a=room, b=room))
    anew = split_anew(setup, ["a", "b"], fleet(a=1 << 40, b=1 << 40))
    assert anew.hosts == ("a", "b")
    assert anew.layers == asked("a,b").layers
    assert (anew.capacity, anew.max_model_len) == (setup.capacity, setup.max_model_len)


def test_a_split_that_was_stated_does_not_hold_for_fewer_stages() -> None:
    anew = split_anew(asked(layer_split="1,1,14"), ["a", "c"], fleet(a=1 << 40, c=1 << 40))
    assert anew.hosts == ("a", "c")
    assert anew.layers == asked("a,c").layers


def test_no_host_gets_more_stages_than_were_asked_for() -> None:
    setup = asked(pipeline_parallel_size=4)
    assert setup.hosts == ("a", "a", "b", "c")
    anew = split_anew(setup, ["b"], fleet(b=1 << 40))
    assert anew.hosts == ("b", "b")
    assert anew.layers[-1][1] == setup.layers[-1][1]


def test_a_host_that_is_named_for_two_gpus_is_one_host_to_move_to() -> None:
    """Its two stages go on there, and a third fits on a GPU of it when the other host is lost."""
    devices = tuple(DeviceFacts(device=name, model="m", free=1 << 40) for name in ("cpu", "cuda:0", "cuda:1"))
    living = {name: msgspec.structs.replace(host(1 << 40), devices=devices) for name in "ab"}
    setup = resolve_options(EngineOptions(model="demo", hosts="a,a,b", device="cuda"), living)
    assert (setup.hosts, setup.devices[:3]) == (("a", "a", "b"), ("cuda:0", "cuda:1", "cuda:0"))
    left = {"a": living["a"]}
    there = names_there(setup, SimpleNamespace(hosts=living), left)  # type: ignore[arg-type]
    assert there == ["a"]
    moved = same_split(setup, there, left)
    assert (moved.hosts, moved.devices[:3]) == (("a", "a", "a"), ("cuda:0", "cuda:0", "cuda:1"))
    anew = split_anew(setup, there, left)
    assert (anew.hosts, anew.devices[:2]) == (("a", "a"), ("cuda:0", "cuda:1"))


def test_what_is_split_anew_takes_as_many_requests_as_before() -> None:
    setup = replace(asked(), options=replace(asked().options, max_num_seqs=3))
    assert split_anew(setup, ["a"], fleet(a=1 << 40)).options.max_num_seqs == 3


def test_a_host_that_is_being_sent_its_layers_is_used_where_there_is_no_other_way() -> None:
    plenty = fleet(a=1 << 40, b=1 << 40, c=1 << 40)
    ways = [make() for make in placements(asked(), ["a", "b", "c"], {"c"}, plenty)]
    assert [one.hosts for one in ways] == [("a", "b", "b"), ("a", "b"), ("a", "b", "c"), ("a", "b", "c")]
    ways = [make() for make in placements(asked(), ["a", "b", "c"], {"a", "b", "c"}, plenty)]
    assert [one.hosts for one in ways] == [("a", "b", "c"), ("a", "b", "c")]
    assert placements(asked(), [], (), {}) == []


def ranked(hosts: str, stages: int, living: dict[str, HostFacts], **options: Any) -> Resolved:
    shape = {"pipeline_parallel_size": stages, "tensor_parallel_size": 2}
    return resolve_options(EngineOptions(model="demo", hosts=hosts, kv_slots=1000, **shape, **options), living)


def test_a_rank_whose_host_is_lost_goes_to_its_neighbours_host_and_the_others_stay() -> None:
    plenty = fleet(a=1 << 40, b=1 << 40, c=1 << 40, d=1 << 40)
    setup = ranked("a,b,c,d", 2, plenty)
    assert (setup.hosts, setup.groups) == (("a", "c"), (("a", "b"), ("c", "d")))
    moved = same_split(setup, ["a", "b", "c"], plenty)
    assert (moved.hosts, moved.groups) == (("a", "c"), (("a", "b"), ("c", "c")))
    led_elsewhere = same_split(setup, ["b", "c", "d"], plenty)
    assert led_elsewhere.groups[1] == ("c", "d")
    assert (led_elsewhere.hosts[0], len(led_elsewhere.layers)) == (led_elsewhere.groups[0][0], 2)
    spare = same_split(ranked("a,b,c", 1, plenty), ["a", "c"], plenty)
    assert spare.groups == (("a", "c"),)


def test_ranks_have_room_for_their_own_shares() -> None:
    """Half a stage fits where the whole does not; what fits nowhere is split into no more stages than before."""
    setup = ranked("a,b,c,d", 2, fleet(a=1 << 40, b=1 << 40, c=1 << 40, d=1 << 40))
    each = needed_by_rank(setup)
    assert len(each) == 4
    assert each[0] > each[1] > 0  # the embedding
    assert sum(each) >= sum(needed_bytes(setup))
    with pytest.raises(ConfigError, match="room for stage"):
        same_split(setup, ["a", "b"], fleet(a=max(each), b=max(each)))
    anew = split_anew(setup, ["a", "b"], fleet(a=1 << 40, b=1 << 40))
    assert anew.groups == (("a", "b"),)
    assert anew.layers == ((0, setup.layers[-1][1]),)


def test_threads_of_ranks_are_those_of_their_hosts_or_shares_of_the_stages() -> None:
    living = fleet(a=1 << 40, b=1 << 40)
    cores = living["a"].cores
    apart = ranked("a,b", 1, living)
    assert [place.threads for place in apart.ranks[0]] == [cores, cores]
    stated = ranked("a,b", 1, living, threads=3)
    assert [place.threads for place in stated.ranks[0]] == [3, 3]
    together = ranked("a", 1, living, threads=3)
    assert [place.threads for place in together.ranks[0]] == [1, 2]
    assert (together.threads[0], stage_plans(together)[0].places) == (3, ())
    (plan,) = stage_plans(apart)
    assert [place.host for place in plan.places] == ["a", "b"]


def test_hosts_without_a_number_of_stages_are_grouped() -> None:
    living = fleet(a=1 << 40, b=1 << 40, c=1 << 40, d=1 << 40)
    setup = resolve_options(EngineOptions(model="demo", hosts="a,b,c,d", tensor_parallel_size=2), living)
    assert setup.groups == (("a", "b"), ("c", "d"))
    shared = resolve_options(
        EngineOptions(model="demo", hosts="a,b", pipeline_parallel_size=2, tensor_parallel_size=2), living
    )
    assert shared.groups == (("a", "a"), ("b", "b"))
