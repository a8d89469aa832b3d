"""The worth of planning: ``penstock plan`` beside plans made by hand, on presets and on clusters drawn at random.

python -m benchmarks.results --measure plans
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console

from benchmarks.shared.measured import Taken
from penstock.cluster import load_devices, preset_names
from penstock.core import ConfigError
from penstock.lab.plan import planned
from penstock.lab.plan_choices import OURS, Planning, PlanOptions

NAME: Final = "plans"
HOW: Final = "Simulated, a drafter like the demo pair's"
COMMAND: Final = "python -m benchmarks.results --measure plans"
RANDOM: Final = 200
TOKENS, PROMPT = 24, 64


def names() -> Iterator[str]:
    """The presets, and random clusters of 2 to 8 stages."""
    yield from preset_names()
    yield from (f"random-{seed}:{2 + seed % 7}" for seed in range(RANDOM))


def take() -> Taken:
    return [COMMAND], [found for name in names() if (found := planned_seconds(name)) is not None]


def planned_seconds(name: str) -> dict[str, Any] | None:
    """Seconds of an answer by plan; None where nothing fits."""
    options = PlanOptions(cluster=name, tokens=TOKENS, prompt_tokens=PROMPT)
    try:
        planning = Planning(load_devices(name), options)
        found = planned(planning, Console(quiet=True))
    except ConfigError:
        return None
    seconds = {one.name: one.speed.answer_s for one in found.compared if one.speed is not None}
    used = len(found.chosen.cluster.stages)
    return {"cluster": name, "devices": len(planning.devices), "used": used, "seconds": seconds}


def gains(figures: list[dict[str, Any]], other: str) -> list[float]:
    """Speed of our plan over another one, in ascending order, where there is that plan."""
    return sorted(one["seconds"][other] / one["seconds"][OURS] for one in figures if other in one["seconds"])
