"""A learned drafter of any layout with its configuration or weights changed either opens or is refused."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.load.attacking.checkpoints import WEIGHTS, change, open_speculator
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.core import ConfigError
from penstock.files import fields_of
from tests import speculators
from tests.checkpoints import make_checkpoint
from tests.speculators import Draft

LAYOUTS: dict[str, Callable[[Checkpoint], Draft]] = {
    "eagle": speculators.eagle,
    "eagle3": speculators.eagle3,
    "speculators_eagle3": speculators.speculators_eagle3,
    "eagle31": speculators.eagle31,
    "dflash": speculators.dflash,
    "sliding_dflash": speculators.sliding_dflash,
    "speculators_dflash": speculators.speculators_dflash,
    "dflash2": speculators.dflash2,
    "speculators_dflash2": speculators.speculators_dflash2,
    "headrace": speculators.headrace,
    "jetspec": speculators.jetspec,
    "dspark": speculators.dspark,
    "gated_dspark": speculators.gated_dspark,
    "speculators_dspark": speculators.speculators_dspark,
    "peagle": speculators.peagle,
    "speculators_peagle": speculators.speculators_peagle,
    "nemo_peagle": speculators.nemo_peagle,
    "medusa": speculators.medusa,
    "vllm_medusa": speculators.vllm_medusa,
    "mtp": speculators.mtp,
    "spd": speculators.spd,
    "spd_paper": speculators.spd_paper,
    "early_exit": speculators.early_exit,
}
WALKED = ("eagle", "eagle3", "speculators_dflash", "dflash2", "dspark", "peagle", "spd")
"""Layouts whose configurations have all fields of the others."""
ROTARY = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 1.0}}
"""Fields that the walked layers get beside those of their own."""
STRANGE = ("x", -1, 0, 1.5, 1 << 70, math.nan, True, [], [-1], {"x": 1})
"""Values that few fields may have."""
TURNS = 4
"""One in so many values is tried in each field, all in turn; `make test-all` tries all."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def sound(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each layout."""
    folder, opened = tmp_path_factory.mktemp("sound"), open_checkpoint(str(target))
    for name, made in LAYOUTS.items():
        made(opened).save(folder / name, WEIGHTS)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_opens_as_it_is(sound: Path, target: Path, layout: str) -> None:
    open_speculator(sound / layout, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(
    max_examples=settings().max_examples * 2 // 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rng=st.randoms(use_true_random=False), file=st.sampled_from(["config.json", "config.json", WEIGHTS]))
def test_any_change_is_refused_or_does_not_matter(
    sound: Path, target: Path, tmp_path: Path, layout: str, rng: random.Random, file: str
) -> None:
    folder = tmp_path / "mutated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound / layout, folder)
    change(folder / file, rng)
    with contextlib.suppress(ConfigError):
        open_speculator(folder, target)


@pytest.mark.parametrize("turns", [TURNS, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("layout", WALKED)
def test_no_field_of_any_type_is_an_error_of_a_library(
    sound: Path, target: Path, tmp_path: Path, layout: str, turns: int
) -> None:
    folder = shutil.copytree(sound / layout, tmp_path / "walked")
    config = json.loads((folder / "config.json").read_text())
    of_layers = config.get("transformer_layer_config", config)
    of_layers |= {} if "rope_parameters" in of_layers else copy.deepcopy(ROTARY)
    messages = []
    for number, (path, _, _) in enumerate(list(fields_of(config))):
        for value in STRANGE[number % turns :: turns]:
            (folder / "config.json").write_text(json.dumps(replaced(config, path, value)))
            try:
                open_speculator(folder, target)
            except ConfigError as error:
                messages.append(str(error))
    intro = f"speculative_config.model is '{folder}': "
    assert messages
    assert [one for one in messages if not one.startswith(intro) or "\n" in one] == []


def replaced(config: Any, path: str, value: object) -> Any:
    """A copy of a configuration with another value of one field."""
    changed = copy.deepcopy(config)
    *outer, last = path.split(".")
    table = changed
    for name in outer:
        table = table[name]
    table[last] = value
    return changed
