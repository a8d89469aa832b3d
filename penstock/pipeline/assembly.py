"""From a stage's plan to its parts: layers, core and driver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.emulation.link import link_of
from penstock.emulation.stage import emulated_driver
from penstock.pipeline.plan import StagePlan
from penstock.stage.core import StageCore
from penstock.stage.device import Accelerator, Device, Link
from penstock.stage.driver import Core, StageDriver


def load_layers(plan: StagePlan, on_read: Callable[[int, int], None] | None = None) -> Any:
    """Load the stage's layers, or the learned drafter's module.

    ``on_read`` is called with how many numbers have been read, and how many there are.
    """
    from penstock.models.stage_model import load_stage

    if plan.target:
        from penstock.models.speculators.stage import load_speculator_stage

        return load_speculator_stage(
            plan.model,
            plan.target,
            capacity=plan.capacity,
            dtype=plan.dtype,
            device=plan.device,
            quantization=plan.quantization,
        )
    return load_stage(
        plan.model,
        plan.first,
        plan.last,
        capacity=plan.capacity,
        dtype=plan.dtype,
        device=plan.device,
        quantization=plan.quantization,
        max_model_len=plan.max_model_len,
        tokenizer=plan.tokenizer,
        numerics=plan.numerics,
        gives_back=plan.gives_back,
        on_read=on_read,
    )


def compute_with(threads: int) -> None:
    """Have torch use this number of threads in this process from now on."""
    import torch

    torch.set_num_threads(threads)


def make_core(plan: StagePlan, index: int, stages: int, layers: Any) -> StageCore:
    """The core of stage ``index`` of ``stages``, which computes with ``layers`` from ``load_layers``."""
    taps = plan.tap.layers if plan.tap is not None else ()
    if taps:
        layers.tap(taps)
    core = StageCore(layers, plan.capacity, is_last=index == stages - 1, taps=taps, vocab_size=plan.vocab_size)
    if plan.target:
        core.reader = layers
    return core


def make_driver(plan: StagePlan, index: int, core: Core, clock: Callable[[], float]) -> StageDriver:
    if plan.emulation is None:
        return StageDriver(index, core, clock, real_device(plan.device, clock))
    return emulated_driver(index, core, clock, plan.emulation)


def real_device(device: str, clock: Callable[[], float]) -> Device:
    """Keeps the time of a stage whose device, by torch's name, is not modelled."""
    if device == "cpu":
        return Device(clock)
    from penstock.models.devices import finish

    return Accelerator(clock, partial(finish, device))


def entrance(plan: StagePlan) -> Link:
    """The engine's link to the first stage."""
    return link_of(plan.emulation.up if plan.emulation is not None else None)
