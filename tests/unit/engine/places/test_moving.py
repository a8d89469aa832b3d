"""Where stages go when hosts are lost: the same stages on other hosts, or all layers split anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.core import ConfigError
from penstock.engine.options import EngineOptions
from penstock.engine.places.footprint import needed_bytes
from penstock.engine.places.moving import placements, same_split, split_anew
from penstock.engine.resolve import Resolved, resolve_options
from penstock.hosts.facts import HostFacts, own_facts


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
