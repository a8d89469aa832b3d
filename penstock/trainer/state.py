"""A run's state as one file, replaced atomically.

Everything random is drawn from seed and step (the order of the data from seed and epoch), so that no generator's state
belongs to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.core import ConfigError


@dataclass(frozen=True)
class Entry:
    """Figures at one saved step: the mean loss since the one before, and fractions on held-out data.

    ``by_step`` is ``Acceptance``'s; it is empty in processes that do not evaluate.
    """

    step: int
    loss: float
    by_step: tuple[tuple[float, ...], ...]
    speedup: float | None = None


@dataclass
class State:
    """The state after ``step`` optimiser steps. ``settings`` identify the run to which it belongs."""

    settings: Mapping[str, Any]
    step: int = 0
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    history: list[Entry] = field(default_factory=list)


def save_state(state: State, file: Path) -> None:
    unfinished = file.with_suffix(".unfinished")
    history = [[entry.step, entry.loss, entry.by_step, entry.speedup] for entry in state.history]
    content = {
        "settings": json.dumps(state.settings),
        "step": state.step,
        "weights": dict(state.weights),
        "optimizer": dict(state.optimizer),
        "history": json.dumps(history),
    }
    with unfinished.open("wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)


def load_state(file: Path, settings: Mapping[str, Any]) -> State:
    """The state in ``file``, or a fresh one. Raises ConfigError if it belongs to a run with other settings."""
    if not file.is_file():
        return State(settings)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"output: {file} is damaged; begin anew with --restart") from error
    held, asked = json.loads(content["settings"]), json.loads(json.dumps(settings))
    different = [name for name in asked if held.get(name) != asked[name]]
    if different:
        was = ", ".join(f"{name} {held.get(name)!r}" for name in different)
        now = ", ".join(f"{name} {asked[name]!r}" for name in different)
        raise ConfigError(f"output: {file.parent} holds a run with {was}, not {now}; use another folder, or --restart")
    history = [
        Entry(step, loss, tuple(map(tuple, by_step)), speedup)
        for step, loss, by_step, speedup in json.loads(content["history"])
    ]
    return State(held, content["step"], content["weights"], content["optimizer"], history)
