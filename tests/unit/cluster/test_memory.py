"""A device's memory, worked out by hand; a cluster file that does not fit is refused with the numbers."""

from __future__ import annotations

import pytest

from penstock.cluster import PRICES, load_cluster, preset_names
from penstock.cluster.load import ClusterFile, resolve
from penstock.cluster.timing import held_by
from penstock.config import FieldError, parse
from tests.unit.cluster.sample import EMULATED


def test_llama_2_7b_as_its_config_has_it() -> None:
    """Its cache takes 2 x 32 x 4096 x 2 bytes = 0.5 MiB a token; a grouped one an eighth of its heads' share."""
    whole = held_by(PRICES["llama-2-7b-fp16"], range(32), 4096, embedding=True, head=True)
    assert whole.weights == pytest.approx(6.738e9 * 2, rel=1e-3)
    assert whole.cache == 4096 * (1 << 19)
    grouped = PRICES["llama-3.1-70b-bf16"]
    assert grouped.slot_bytes(range(80)) == 2 * 80 * 1024 * 2
    assert grouped.pair_operations(range(1)) == 4 * 8192
    assert PRICES["medusa-head-llama-2-7b-fp16"].slot_bytes(range(1)) == 0


def test_two_models_on_a_device_share_the_room_for_activations() -> None:
    price = PRICES["llama-160m-fp16"]
    one = held_by(price, range(12), 100, embedding=True, head=True)
    both = one + one
    assert both.total == pytest.approx(2 * one.total - one.activations)


def test_a_longer_context_is_refused_with_the_numbers() -> None:
    """Sample: 2 layers of 2 GB; a token's KV is 2 x 2 x 1000 x 2 bytes, so a million take 8 GB."""
    with pytest.raises(FieldError, match=r"10\.52 GB for its 2 layers \(weights 2\.50, 1000000 tokens of KV 8\.00"):
        resolve(parse(ClusterFile, {**EMULATED, "kv_slots": 1_000_000}))
    local = {"name": "x", "devices": [{"name": "a"}], "stages": [{"devices": ["a"]}], "kv_slots": 100}
    with pytest.raises(FieldError, match="kv_slots counts in the memory of modelled devices"):
        resolve(parse(ClusterFile, local))


def test_every_preset_holds_what_it_names() -> None:
    for name in preset_names():
        load_cluster(name)
