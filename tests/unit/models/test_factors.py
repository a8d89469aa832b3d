"""Factors that a configuration knows are seen in every format of weights, wherever layers could be fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.files import DTYPE_BYTES
from penstock.models.fused import FusedBase, agree, has_form, widened
from penstock.models.stage_model import load_stage
from tests.checkpoints import ARCHITECTURES, FURTHER, LAYERS, RECURRENT, UNUSUAL, make_checkpoint, settings_of
from tests.relatives import RELATIVES
from tests.staged import Staged, chain_rows

TOKENS = [17, 3, 99, 42, 8, 64, 120, 5, 31, 77]
GRANITES = {
    "embedding_multiplier": True,
    "logits_scaling": True,
    "residual_multiplier": False,
    "attention_multiplier": True,
}
FACTORS = {
    "granite": GRANITES,
    "granite_swa": GRANITES,
    "mimo_v2_flash": {"attention_value_scale": False},
    "olmo": {"clip_qkv": False},
}
"""Those of families whose layers have llama's parts, and whether layers of a later stage are fused all the same."""
NO_FACTORS = {"initializer_range", "rms_norm_eps", "attention_dropout", "residual_dropout", "layer_rope_theta"}
FAMILIES = ARCHITECTURES | FURTHER | RECURRENT | UNUSUAL | RELATIVES
PAIRS = [(family, factor) for family, factors in FACTORS.items() for factor in factors]


def factors_of(family: str) -> set[str]:
    """The numbers in a configuration that may scale something, if the first decoder layer has llama's form."""
    config = AutoConfig.for_model(**settings_of(family))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers: Any = next((part for name, part in model.named_modules() if name.endswith("layers")), [None])
    if layers[0] is None or not hasattr(layers[0], "self_attn") or not has_form(layers[0]):
        return set()
    kinds = {name: kind for one in type(config).__mro__ for name, kind in vars(one).get("__annotations__", {}).items()}
    experts = {name for name in kinds if name.startswith(("rout", "moe"))}  # dense layers know nothing of them
    return {name for name, kind in kinds.items() if "float" in str(kind)} - NO_FACTORS - experts


def test_every_factor_is_walked() -> None:
    found = {family: factors for family in FAMILIES if (factors := factors_of(family))}
    assert found == {family: set(factors) for family, factors in FACTORS.items()}


def is_fused(path: Path, first: int, dtype: str) -> bool:
    stage = load_stage(str(path), first, LAYERS, capacity=8, dtype=dtype, max_model_len=64)
    return isinstance(stage._base, FusedBase)


def scaled_checkpoint(folder: Path, family: str, factor: str) -> Path:
    """One with a factor that differs from the family's default; the embedding's is neutral where another is tried."""
    neutral = {"embedding_multiplier": 1.0} if family.startswith("granite") else {}
    return make_checkpoint(folder, family, initializer_range=0.1, **{**neutral, factor: 0.7})


@pytest.mark.parametrize(("family", "factor"), PAIRS)
def test_what_is_fused_is_the_same_in_every_format(tmp_path: Path, family: str, factor: str) -> None:
    path = scaled_checkpoint(tmp_path, family, factor)
    later = FACTORS[family][factor]
    whole = later and factor != "embedding_multiplier"
    for dtype in DTYPE_BYTES:
        assert (is_fused(path, 0, dtype), is_fused(path, 2, dtype)) == (whole, later), dtype


@pytest.mark.parametrize(("family", "factor"), PAIRS)
def test_scaled_logits_are_as_close_to_float32_as_those_of_transformers(
    tmp_path: Path, family: str, factor: str
) -> None:
    path = scaled_checkpoint(tmp_path, family, factor)
    full, *halves = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))(torch.tensor([TOKENS])).logits[0]
        for dtype in ("float32", "bfloat16", "float16")
    )
    for dtype, half in zip(("bfloat16", "float16"), halves, strict=True):
        rows = chain_rows(0, TOKENS, range(len(TOKENS)))
        found = Staged(path, 2, dtype=dtype, max_model_len=64).run(rows, range(len(TOKENS)), opened=[0])
        assert (found - full).norm() < 2 * (half.float() - full).norm(), dtype


class Scaled(nn.Linear):
    """Scales what its weight gives by a number that no narrow format could tell from 1."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 1.001


@pytest.mark.parametrize("dtype", [getattr(torch, dtype) for dtype in DTYPE_BYTES])
def test_agreement_is_judged_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(32, 32).to(dtype), Scaled(32, 32).to(dtype)
    other.load_state_dict(one.state_dict())
    sample = torch.randn(1, 3, 32)
    with torch.no_grad():
        assert agree(widened(one)(sample), widened(one)(sample))
        assert not agree(widened(one)(sample), widened(other)(sample))
    if dtype != torch.float32:
        with pytest.raises(TypeError, match="have to be torch"):
            agree(sample.to(dtype), sample)


def test_a_large_residual_hides_nothing() -> None:
    torch.manual_seed(0)
    residual, added = torch.randn(1, 3, 32) * 1e3, torch.randn(1, 3, 32) * 1e-2
    assert agree(residual + added, residual + added, residual)
    assert not agree(residual + 0.7 * added, residual + added, residual)
    assert not agree(residual + torch.nan, residual + added, residual)


def test_a_copy_leaves_the_module_and_its_open_files_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    module[0].stored = [open]  # type: ignore[assignment]
    copied = widened(module)
    assert module[0].weight.dtype == torch.bfloat16
    assert copied[0].weight.dtype == torch.float32
    assert copied[0].stored is module[0].stored
    assert torch.equal(copied[0].weight, module[0].weight.float())
