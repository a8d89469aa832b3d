"""The probe notices on the first row whatever an architecture does against our assumptions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.core import ConfigError
from penstock.models import loader
from penstock.models.probe import ProbedAttention, check_calls
from penstock.models.stage_model import load_stage
from tests.checkpoints import make_checkpoint

CONFIG = SimpleNamespace(model_type="strange", layer_types=["full_attention", "sliding_attention"])
ROW = torch.zeros(2, 1, 4)


def probe(layers: list[int], mask: Any = None, windows: tuple[int | None, ...] = (None, 8), **options: Any) -> None:
    probed = ProbedAttention(lambda *args, **options: ROW)  # type: ignore[arg-type]
    for layer in layers:
        module = SimpleNamespace(layer_idx=layer)
        probed(module, ROW, ROW, ROW, mask, sliding_window=windows[layer], scaling=1.0, **options)
    check_calls(CONFIG, 0, 2, probed)


def test_usual_calls_pass() -> None:
    probe([0, 1], dropout=0.0, position_ids=torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"layers": [0]}, "exactly once"),
        ({"layers": [0, 1, 1]}, "exactly once"),
        ({"layers": [0, 1], "mask": torch.zeros(1)}, "own attention mask"),
        ({"layers": [0, 1], "is_causal": False}, "not causal"),
        ({"layers": [0, 1], "position_bias": torch.zeros(1)}, "position_bias"),
        ({"layers": [0, 1], "windows": (None, None)}, "layer 1 is sliding_attention, but its window is None"),
        ({"layers": [0, 1], "windows": (4, 8)}, "layer 0 is full_attention, but its window is 4"),
    ],
)
def test_strange_calls_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"'strange'.*{reason}"):
        probe(**arguments)


def test_a_layer_that_looks_both_ways_is_refused() -> None:
    probed = ProbedAttention(lambda *args, **options: ROW)  # type: ignore[arg-type]
    probed(SimpleNamespace(layer_idx=0, is_causal=False), ROW, ROW, ROW, None)
    with pytest.raises(ConfigError, match="not causal"):
        check_calls(CONFIG, 0, 1, probed)


def test_hidden_states_changed_on_the_way_in_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite multiplies whatever enters; here nobody told its later stages not to."""
    path = make_checkpoint(tmp_path, "granite")
    load_stage(str(path), 1, 3, capacity=8)
    monkeypatch.setattr(loader, "EMBEDDING_FACTORS", ())
    with pytest.raises(ConfigError, match=r"'granite'.*changes the hidden states"):
        load_stage(str(path), 1, 3, capacity=8)
