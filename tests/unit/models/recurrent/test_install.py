"""Mixers in place of transformers' own: whole models whose layers carry a state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core import ConfigError
from penstock.messages import CommittedSlots
from penstock.models import mixers
from penstock.models.mixers import ShortConvolution
from penstock.models.packing import usable
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, VOCAB, make_checkpoint
from tests.staged import Staged, chain_rows

TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(150)]
KINDS = ["qwen3_5", "kimi_linear", "granitemoehybrid", "lfm2"]


@pytest.mark.parametrize("architecture", KINDS)
def test_a_long_prompt_in_chunks_of_any_size_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    """The prompt is long enough for two folds; the last token of every chunk is compared."""
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = reference(torch.tensor([TEXT])).logits[0]
    stages = Staged(path, 3, capacity=160)
    for sizes in ([150], [64, 64, 22], [1, 30, 40, 79], [149, 1]):
        staged, first = stages.begin(), 0
        for size in sizes:
            rows = chain_rows(0, TEXT[first : first + size], range(first, first + size), first, first - 1)
            committed = [CommittedSlots(0, list(range(first, first + size)))]
            (logits,) = staged.run(rows, [size - 1], [0] if first == 0 else [], committed)
            first += size
            torch.testing.assert_close(logits, expected[first - 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_to_float32_as_transformers_is(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1)
    found = Staged(path, 2, dtype=dtype).run(chain_rows(0, TEXT[:20], range(20)), range(20), opened=[0])
    full, half = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, kind))(torch.tensor([TEXT[:20]])).logits[0]
        for kind in ("float32", dtype)
    )
    assert (found - full).norm() < 2 * (half.float() - full).norm()


@pytest.mark.skipif(not usable("int4"), reason="this processor lacks what compiled products need")
def test_quantized_rows_do_not_depend_on_the_size_of_the_batch(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_5", initializer_range=0.1, hidden_size=64, intermediate_size=64)
    at_once, one_by_one = (Staged(path, 2, quantization="int4") for _ in range(2))
    expected = at_once.run(chain_rows(0, TEXT[:12], range(12)), range(12), opened=[0])
    for i in range(12):
        one = chain_rows(0, [TEXT[i]], [i], i, i - 1)
        logits = one_by_one.run(one, [0], opened=[0] if i == 0 else [])
        torch.testing.assert_close(logits[0], expected[i], atol=1e-3, rtol=0)


def test_a_mixer_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(ShortConvolution):
        def mix(self, hidden_ND: torch.Tensor, plan: object) -> torch.Tensor:
            return super().mix(hidden_ND, plan) * 1.01  # type: ignore[arg-type]

    path = make_checkpoint(tmp_path, "lfm2")
    monkeypatch.setattr(mixers, "MIXERS", {"Lfm2ShortConv": Other})
    with pytest.raises(ConfigError, match="'lfm2' is not supported: transformers' Lfm2ShortConv computes something"):
        load_stage(str(path), 0, LAYERS, capacity=24)


def test_an_unknown_mixer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left as it is, it would silently take a tree for a text."""
    path = make_checkpoint(tmp_path, "lfm2")
    monkeypatch.setattr(mixers, "MIXERS", {})
    with pytest.raises(ConfigError, match="carries a state"):
        load_stage(str(path), 0, LAYERS, capacity=24)


def test_a_loaded_stage_holds_nothing_yet(tmp_path: Path) -> None:
    stage = load_stage(str(make_checkpoint(tmp_path, "qwen3_5")), 0, LAYERS, capacity=24)
    kept = [array for mixer in stage._mixers.members for slots in mixer.slots for array in slots.arrays]
    assert len(kept) == 3 * 4  # convolution, keys, what is added, log decays
    assert not any(array.any() for array in kept)
    assert stage.kv_bytes > sum(array.nbytes for array in kept)
