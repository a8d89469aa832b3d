"""Where stages go when hosts are lost: the same stages on other hosts, or all layers split anew."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.core import ConfigError
from penstock.engine.options import EngineOptions
from penstock.engine.parts import names_there, placements, same_split, split_anew
from penstock.engine.profile.measure import needed_bytes
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
