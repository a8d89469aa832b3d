"""MTP heads: what a checkpoint ships computes what transformers' own module does, and what does not fit is refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config import FieldError
from penstock.hosts.weights import Held, safetensors_ranges
from penstock.models.loader import load_module
from penstock.models.speculators.open import open_speculator
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint, make_wrapper
from tests.unit.models.test_speculators import CHAIN, TREE, Rows, at_once_and_apart, run

OURS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "post_norm",
    "shared_head.norm": "post_norm",
}
"""Names in files, and what transformers' module calls the same."""


def shipped(folder: Path, architecture: str) -> Path:
    return speculators.ship_mtp(make_checkpoint(folder, architecture))


def transformers_head(folder: Path, architecture: str) -> Any:
    """transformers' own module with the weights of the first head in the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.num_mtp_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.mtp_layer_types = ["full_attention"]
    head = MtpModel(model, 1)
    behind = f"model.layers.{model.config.num_hidden_layers}."
    state: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if match := re.match(rf"(mtp\.layers\.0\.|mtp\.|{re.escape(behind)})(.*)\.(\w+)$", name):
            _, inner, last = match.groups()
            ours = OURS.get(inner, inner if inner in ("eh_proj", "enorm", "hnorm") else f"mtp_block.{inner}")
            if inner not in ("embed_tokens", "shared_head.head"):
                state[f"layers.0.{ours}.{last}"] = tensor
    missing, unexpected = head.layers.load_state_dict(
        {name.removeprefix("layers."): tensor for name, tensor in joined(state).items()}, strict=True
    )
    assert not missing
    assert not unexpected
    return head.eval()


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that are stored one by one as transformers has them."""
    one_by_one = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    found = {name: tensor for name, tensor in state.items() if not one_by_one.fullmatch(name)}
    matches = [match for match in map(one_by_one.fullmatch, state) if match]
    for experts in {match[1] for match in matches}:
        numbers = range(1 + max(int(match[2]) for match in matches))
        gate, up, down = (
            torch.stack([state[f"{experts}.{i}.{part}_proj.weight"] for i in numbers])
            for part in ("gate", "up", "down")
        )
        found |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    return found


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_shipped_head_is_transformers_own(tmp_path: Path, architecture: str) -> None:
    """Over a chain and over a tree, at once and in batches; a tree's row as at the end of its path alone."""
    folder = shipped(tmp_path, architecture)
    target = open_checkpoint(str(folder))
    checkpoint = open_speculator(str(folder), target)
    assert (checkpoint.kind, checkpoint.reads, checkpoint.depth) == ("mtp", (target.num_layers,), 1)
    module, judge = checkpoint.load(target, "float32", "cpu"), transformers_head(folder, architecture)
    for parents in (CHAIN, TREE):
        rows = Rows(parents, target.hidden_size)
        expected_ND = torch.stack([at_end_of(rows, row, judge) for row in range(len(parents))])
        for batches in at_once_and_apart(rows):
            with torch.inference_mode():
                found_ND = run(module, rows, module.fuse(rows.features_NF), batches)
            torch.testing.assert_close(found_ND, expected_ND, atol=1e-4, rtol=1e-4)
        with torch.inference_mode():
            logits = judge._project_to_logits(expected_ND)
            torch.testing.assert_close(module.logits(expected_ND), logits, atol=1e-4, rtol=1e-4)


def at_end_of(rows: Rows, row: int, judge: Any) -> Tensor:
    """transformers' output for a row after all of its ancestors [D]."""
    path = torch.nonzero(rows.sees_NN[row])[:, 0]
    with torch.inference_mode():
        hidden_1nD = judge.forward_layer(
            0, rows.features_NF[path][None], rows.positions_N[path][None], None, input_ids=rows.tokens_N[path][None]
        )
    return hidden_1nD[0, -1]


def test_a_head_apart_is_like_the_targets_last_layer(tmp_path: Path) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", "qwen3")))
    folder = speculators.mtp(target).save(tmp_path / "head")
    module = open_speculator(str(folder), target).load(target, "float32", "cpu")
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(module.layer.self_attn.q_norm.weight, stored["mtp.layers.0.self_attn.q_norm.weight"])
    assert torch.equal(module.eh_proj.weight, stored["mtp.fc.weight"])


def test_the_wrappers_own_head_is_found(tmp_path: Path) -> None:
    folder = speculators.ship_mtp(make_wrapper(tmp_path, "qwen3_5"))
    target = open_checkpoint(str(folder))
    assert not [name for name in target.weights.names() if name.startswith("mtp.")]
    checkpoint = open_speculator(str(folder), target)
    assert checkpoint.draft_vocab_size == VOCAB
    checkpoint.load(target, "float32", "cpu")


def test_stages_and_other_hosts_have_nothing_of_a_head(tmp_path: Path) -> None:
    plain = open_checkpoint(str(make_checkpoint(tmp_path / "plain", "qwen3_5")))
    with_head = open_checkpoint(str(shipped(tmp_path / "shipped", "qwen3_5")))
    assert sorted(plain.weights.names()) == sorted(with_head.weights.names())
    assert [plain.even_split(n) for n in (2, 3)] == [with_head.even_split(n) for n in (2, 3)]
    wanted = [
        sum(end - start for start, end in safetensors_ranges(one.path / "model.safetensors", [Held(0, 2)], 5)[1:])
        for one in (plain, with_head)
    ]
    assert wanted[0] == wanted[1]


def test_of_several_heads_the_first_is_taken_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shipped(tmp_path, "qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.layers.1.input_layernorm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        open_speculator(str(folder), open_checkpoint(str(folder)))
    assert "of its 2 MTP heads the first drafts at every depth" in caplog.text


@pytest.mark.parametrize(
    ("architecture", "wrong", "message"),
    [
        ("qwen3_5", {"mtp.fc.weight": None}, r"lacks the tensor eh_proj.weight \[32, 64\]"),
        ("qwen3_5", {"mtp.norm.weight": torch.ones(31)}, r"mtp.norm.weight is \[31\]; .* ask for \[32\]"),
        ("qwen3_5", {"mtp.layers.0.mlp.up_proj.weight": None}, "lacks the tensor layer.mlp.up_proj.weight"),
        ("qwen3_5", {"mtp.layers.0.mlp.more.weight": torch.ones(1)}, "mtp.layers.0.mlp.more.weight, which no layout"),
        ("glm4_moe", {"model.layers.5.hnorm.weight": torch.ones(32).byte()}, "a weight has to be a float"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, architecture: str, wrong: dict, message: str) -> None:
    folder = shipped(tmp_path, architecture)
    tensors = {**load_file(folder / "model.safetensors"), **wrong}
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FieldError, match=message):
        open_speculator(str(folder), open_checkpoint(str(folder)))


def test_a_checkpoint_without_a_head_says_what_to_do(tmp_path: Path) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path, "qwen3_5")))
    with pytest.raises(FieldError, match=r"method is 'mtp', but .* ships no MTP head: .*penstock train mtp"):
        open_speculator(str(tmp_path), target)


def test_a_target_without_full_attention_has_no_head(tmp_path: Path) -> None:
    llama = open_checkpoint(str(make_checkpoint(tmp_path / "llama", "llama")))
    head = speculators.mtp(llama).save(tmp_path / "head")
    falcon = open_checkpoint(str(make_checkpoint(tmp_path / "falcon", "falcon_h1")))
    with pytest.raises(FieldError, match="has no layer that attends to everything"):
        open_speculator(str(head), falcon)


def test_no_layer_of_the_target_is_read_for_a_head(tmp_path: Path) -> None:
    """The head's layer takes the place of the target's last, which stays what it is."""
    folder = shipped(tmp_path, "deepseek_v3")
    target = open_checkpoint(str(folder))
    module = open_speculator(str(folder), target).load(target, "float32", "cpu")
    own = load_module(target, 4, 5, "float32", "cpu").model.layers[4]
    assert not np.allclose(own.self_attn.o_proj.weight, module.layer.self_attn.o_proj.weight)
