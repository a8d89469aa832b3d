"""docs/reference/hardware.md is what its script writes; what fits is reckoned from weights, cache and devices."""

from __future__ import annotations

from benchmarks.costs import hardware
from benchmarks.shared.measured import stored


def test_the_page_is_what_the_stored_simulations_give() -> None:
    behind = "docs/reference/hardware.md is behind: run python -m benchmarks.costs.hardware"
    assert hardware.PAGE.read_text(encoding="utf-8") == hardware.page(), behind


def test_the_stored_simulations_are_of_these_setups() -> None:
    assert [one["setup"] for one in stored(hardware.NAME).figures] == [repr(setup) for setup in hardware.SETUPS]


def test_as_few_devices_as_hold_weights_and_cache() -> None:
    model = hardware.MODELS["Llama-2-7B"]
    assert round(model.weights_gb(16), 2) == 13.48
    assert round(model.kv_gb(), 3) == 2.147, "keys and values of 32 layers, 4096 numbers and 4096 tokens, 2 bytes each"
    assert model.devices(16, 16) == 2, "15.6 GB are more than 90% of 16"
    assert model.devices(16, 18) == 1
    assert model.devices(16, 1e9) == 1


def test_every_setup_holds_its_model() -> None:
    for setup in hardware.SETUPS:
        memory = hardware.BOARDS[setup.board]["memory_gb"]
        assert setup.devices >= hardware.MODELS[setup.model].devices(setup.bits, memory), setup
        assert len(setup.cluster().stages) == setup.devices
