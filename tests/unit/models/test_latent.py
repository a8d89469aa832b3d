"""Latent attention over compressed slots gives what transformers' own layer gives over keys and values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.files import AUTO, REFERENCE
from penstock.messages import CommittedSlots
from penstock.models import carried as latents
from penstock.models.carried import Latent, keep_latents
from penstock.models.packing import usable
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, make_checkpoint
from tests.staged import Staged, chain_rows

PROMPT = [17, 3, 99, 42, 8, 64, 120]
RANK, TURNED = 16, 8
"""Widths of the checkpoint's latents and of the rotated part; a row keeps both."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", seed=2)


def logits(folder: Path, plain: bool) -> torch.Tensor:
    """Logits after a prompt, and after the token behind it."""
    staged = Staged(folder, 2, numerics=REFERENCE if plain else AUTO)
    slots = list(range(len(PROMPT)))
    first = staged.run(chain_rows(0, PROMPT, slots), [3, 6], opened=[0])
    behind = chain_rows(0, [55], [9], len(PROMPT), len(PROMPT) - 1)
    return torch.cat([first, staged.run(behind, [0], committed=[CommittedSlots(0, slots)])])


@pytest.mark.parametrize("most", [1, 1 << 24], ids=["head by head", "at once"])
@pytest.mark.parametrize("fewest", [1, 7, 1000], ids=["expanded", "the prompt expanded", "compressed"])
def test_every_way_gives_the_logits_of_the_plain_path(
    folder: Path, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(folder, plain=True)
    made = Latent.__init__

    def make(self: Latent, attention: Any) -> None:
        made(self, attention)
        self.cheaper_expanded = fewest

    monkeypatch.setattr(Latent, "__init__", make)
    monkeypatch.setattr(latents, "MOST_EXPANDED", most)
    torch.testing.assert_close(logits(folder, plain=False), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v2", "kimi_linear", "axk1", "glm4_moe_lite", "minicpm3", "youtu"])
def test_every_family_that_has_latents_keeps_them(family: str, tmp_path: Path) -> None:
    stage = load_stage(str(make_checkpoint(tmp_path, family)), 0, LAYERS, capacity=8)
    assert sorted(stage._latents) == ([2, 4] if family == "kimi_linear" else list(range(LAYERS)))


def test_a_row_keeps_its_latent_and_nothing_else(folder: Path) -> None:
    kept = [
        sum(stage.kv_bytes for stage in Staged(folder, 2, numerics=REFERENCE if plain else AUTO).models)
        for plain in (True, False)
    ]
    assert kept == [5 * 96 * 4 * (12 + 8 + 10) * 4, 5 * 96 * (RANK + TURNED) * 4]


@pytest.mark.skipif(not usable("int8"), reason="this processor does not compute with int8")
def test_quantised_stages_keep_latents_too(folder: Path) -> None:
    path = folder.parent / "dense"
    make_checkpoint(path, "deepseek_v3", seed=2, first_k_dense_replace=5)
    staged = Staged(path, 2, quantization="int8")
    assert len(set(staged.greedy(PROMPT, 12))) > 4
    assert sum(stage.kv_bytes for stage in staged.models) == 5 * 96 * (RANK + TURNED) * 4


class OtherLatents(nn.Module):
    """Looks like an attention by latents, and makes something else of them."""

    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, num_heads = 4, 3, 2, 2

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(4, 10, bias=False)

    def expand_kv(self, kept: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_that_makes_something_else_of_a_latent_stays_as_it_is(dtype: torch.dtype) -> None:
    attention = OtherLatents().to(dtype)
    projection = attention.kv_b_proj
    assert keep_latents([SimpleNamespace(self_attn=attention), SimpleNamespace(mixer=None)]) == {}
    assert attention.kv_b_proj is projection
