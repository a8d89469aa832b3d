"""Learned drafters compute what their formulas say, over chains and trees, from every published layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.models.attention import Arenas, Plan, SlotAttention, folded_kernel
from penstock.models.packing import pack
from penstock.models.speculators.base import SpeculatorCheckpoint
from penstock.models.speculators.open import open_speculator
from penstock.stage.visibility import BatchView, RequestView
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint
from tests.speculators import DRAFTED, FIRST_DRAFTED, Draft
from tests.unit.models import speculators_reference as reference

CAPACITY = 24
DRAFTED_IDS = [FIRST_DRAFTED + 2 * i for i in range(DRAFTED)]
CHAIN = [-1, 0, 1, 2, 3, 4, 5]
TREE = [-1, 0, 1, 1, 2, 2, 3, 6]
"""The parent of each row; -1 for none."""

THETA = 10000.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=8)))


def target_weights(target: Checkpoint) -> dict[str, Tensor]:
    return load_file(target.path / "model.safetensors")


class Rows:
    """Rows with these parents, random tokens and features, and slots in no order."""

    def __init__(self, parents: list[int], features: int, first: int = 3) -> None:
        generator = torch.Generator().manual_seed(7)
        count = len(parents)
        self.parents = parents
        self.tokens_N = torch.randint(VOCAB, (count,), generator=generator)
        self.features_NF = torch.randn(count, features, generator=generator)
        self.sees_NN = torch.eye(count, dtype=torch.bool)
        depths: list[int] = []
        for row, parent in enumerate(parents):
            depths.append(depths[parent] + 1 if parent >= 0 else first)
            if parent >= 0:
                self.sees_NN[row] |= self.sees_NN[parent]
        self.positions_N = torch.tensor(depths)
        self.slots = torch.randperm(CAPACITY, generator=generator)[:count].numpy()

    def view(self, rows: list[int]) -> BatchView:
        at, zeros = np.array(rows), np.zeros(len(rows), dtype=np.int64)
        positions = self.positions_N.numpy()
        request = RequestView(0, np.arange(len(rows)), self.slots, positions, self.sees_NN[at].numpy())
        tokens = self.tokens_N.numpy()[at]
        return BatchView(zeros, at, self.slots[at], positions[at], tokens, [request], zeros - 1)


def run(module, rows: Rows, feature_ND: Tensor, batches: list[list[int]]) -> Tensor:
    """The module's output for all rows, which enter in these batches, over one set of slots."""
    arenas, output_ND = Arenas(CAPACITY), torch.zeros(len(rows.parents), module.hidden_size)
    for batch in batches:
        attend = SlotAttention(arenas, Plan(rows.view(batch), torch.device("cpu"), in_place=True), folded_kernel)
        output_ND[batch] = module(rows.tokens_N[batch], feature_ND[batch], rows.positions_N[batch], attend)
    return output_ND


def at_once_and_apart(rows: Rows) -> list[list[list[int]]]:
    every = list(range(len(rows.parents)))
    return [[every], [every[:3], every[3:5], every[5:]]]


def opened(draft: Draft, folder: Path, target: Checkpoint, file: str = "model.safetensors") -> SpeculatorCheckpoint:
    return open_speculator(str(draft.save(folder, file)), target)


def load(checkpoint: SpeculatorCheckpoint, target: Checkpoint):
    return checkpoint.load(target, "float32", "cpu")


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("theta", [None, 500.0])
def test_eagle_is_its_formula(tmp_path: Path, target: Checkpoint, parents, theta: float | None) -> None:
    draft = speculators.eagle(target)
    draft.config |= {} if theta is None else {"rope_theta": theta}
    checkpoint = opened(draft, tmp_path, target)
    assert (checkpoint.kind, checkpoint.reads) == ("eagle", (8,))
    assert (checkpoint.hidden_size, checkpoint.draft_vocab_size) == (32, VOCAB)
    module, rows = load(checkpoint, target), Rows(parents, 32)
    feature_ND = module.fuse(rows.features_NF)
    t = draft.tensors
    given = (rows.tokens_N, rows.features_NF, rows.positions_N, rows.sees_NN, theta or THETA)
    expected_ND = reference.eagle(t, t["embed_tokens.weight"], *given)
    for batches in at_once_and_apart(rows):
        assert_same(run(module, rows, feature_ND, batches), expected_ND)
    assert_same(module.logits(expected_ND), expected_ND @ target_weights(target)["lm_head.weight"].T)


def test_eagle_with_everything_that_may_differ(tmp_path: Path, target: Checkpoint) -> None:
    """Biases of attention but none of fc, no embedding, a head, no grouped heads stated, old buffers beside them."""
    draft = speculators.eagle(target)
    drawn = torch.Generator().manual_seed(3)
    for name, width in (("q", 32), ("k", 16), ("v", 16)):
        draft.tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(width, generator=drawn)
    draft.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    draft.tensors["lm_head.weight"] = torch.randn(VOCAB, 32, generator=drawn)
    del draft.tensors["fc.bias"], draft.tensors["embed_tokens.weight"]
    draft.config["bias"] = False
    module, rows = load(opened(draft, tmp_path, target), target), Rows(TREE, 32)
    embedding = target_weights(target)["model.embed_tokens.weight"]
    given = (rows.tokens_N, rows.features_NF, rows.positions_N, rows.sees_NN, THETA)
    expected_ND = reference.eagle(draft.tensors, embedding, *given)
    assert_same(run(module, rows, rows.features_NF, [list(range(len(TREE)))]), expected_ND)
    assert_same(module.logits(expected_ND), expected_ND @ draft.tensors["lm_head.weight"].T)


def test_key_heads_default_to_all_heads(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.eagle(target)
    del draft.config["num_key_value_heads"]
    with pytest.raises(FieldError, match=r"k_proj.weight is \[16, 32\].* ask for \[32, 32\]"):
        opened(draft, tmp_path, target)


def renamed_for_reference(draft: Draft) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft.tensors.items()}


def fields_for(layout: str) -> dict[str, object]:
    return {"speculators": {"norm_before_residual": False}, "normed": {"norm_before_residual": True}}[layout]


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("layout", ["safeailab", "speculators", "normed"])
def test_eagle3_is_its_formula(tmp_path: Path, target: Checkpoint, parents, layout: str) -> None:
    plain = layout == "safeailab"
    draft = speculators.eagle3(target) if plain else speculators.speculators_eagle3(target, **fields_for(layout))
    checkpoint = opened(draft, tmp_path, target)
    assert (checkpoint.kind, checkpoint.reads, checkpoint.draft_vocab_size) == ("eagle3", (2, 4, 5), DRAFTED)
    module, rows, t = load(checkpoint, target), Rows(parents, 96), renamed_for_reference(draft)
    feature_ND = module.fuse(rows.features_NF)
    assert_same(feature_ND, rows.features_NF @ t["fc.weight"].T)
    embedding = target_weights(target)["model.embed_tokens.weight"]
    given = (rows.tokens_N, feature_ND, rows.positions_N, rows.sees_NN, THETA)
    expected_ND = reference.eagle3(t, embedding, *given, normed_residual=layout == "normed")
    for batches in at_once_and_apart(rows):
        assert_same(run(module, rows, feature_ND, batches), expected_ND)
    logits_nv = reference.rms(expected_ND, t["norm.weight"]) @ t["lm_head.weight"].T
    assert_same(module.logits(expected_ND), reference.scattered(logits_nv, DRAFTED_IDS, VOCAB))


@pytest.mark.parametrize("norm_output", [True, False])
def test_eagle31_norms_each_state_and_its_output(tmp_path: Path, target: Checkpoint, norm_output: bool) -> None:
    draft = speculators.eagle31(target)
    draft.config["norm_output"] = norm_output
    module, rows, t = load(opened(draft, tmp_path, target), target), Rows(TREE, 96), draft.tensors
    states = rows.features_NF.split(32, dim=-1)
    normed = torch.cat([reference.rms(state, t[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)], dim=-1)
    feature_ND = module.fuse(rows.features_NF)
    assert_same(feature_ND, normed @ t["fc.weight"].T)
    embedding = target_weights(target)["model.embed_tokens.weight"]
    given = (rows.tokens_N, feature_ND, rows.positions_N, rows.sees_NN, THETA)
    before_ND = reference.eagle3(t, embedding, *given)
    normed_ND = reference.rms(before_ND, t["norm.weight"])
    expected_ND = normed_ND if norm_output else before_ND
    for batches in at_once_and_apart(rows):
        assert_same(run(module, rows, feature_ND, batches), expected_ND)
    logits_nv = normed_ND @ t["lm_head.weight"].T
    assert_same(module.logits(expected_ND), reference.scattered(logits_nv, DRAFTED_IDS, VOCAB))


def test_what_comes_out_goes_in_as_the_next_feature(tmp_path: Path, target: Checkpoint) -> None:
    """A tree drafted level by level, each row's feature its parent's output: as each path alone as a chain."""
    draft = speculators.eagle3(target)
    module, rows, t = load(opened(draft, tmp_path, target), target), Rows(TREE, 96), draft.tensors
    feature_ND = module.fuse(rows.features_NF)
    arenas, output_ND = Arenas(CAPACITY), torch.zeros(len(TREE), 32)
    for depth in rows.positions_N.unique().tolist():
        level = [row for row in range(len(TREE)) if rows.positions_N[row] == depth]
        for row in level:
            if TREE[row] >= 0:
                feature_ND[row] = output_ND[TREE[row]]
        attend = SlotAttention(arenas, Plan(rows.view(level), torch.device("cpu"), in_place=True), folded_kernel)
        output_ND[level] = module(rows.tokens_N[level], feature_ND[level], rows.positions_N[level], attend)
    embedding = target_weights(target)["model.embed_tokens.weight"]
    for leaf in range(len(TREE)):
        path = rows.sees_NN[leaf].nonzero()[:, 0]
        fed = feature_ND[:1]
        for length in range(1, len(path) + 1):
            own = path[:length]
            given = (rows.tokens_N[own], fed, rows.positions_N[own], torch.ones(length, length).tril().bool(), THETA)
            out = reference.eagle3(t, embedding, *given)
            fed = torch.cat([fed, out[-1:]])
        assert_same(output_ND[leaf], out[-1])


def test_eagle3_of_another_width_brings_its_embedding(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.eagle3(target, width=48)
    checkpoint = opened(draft, tmp_path / "whole", target)
    module, rows = load(checkpoint, target), Rows(TREE, 96)
    feature_ND = module.fuse(rows.features_NF)
    given = (rows.tokens_N, feature_ND, rows.positions_N, rows.sees_NN, THETA)
    expected_ND = reference.eagle3(draft.tensors, draft.tensors["embed_tokens.weight"], *given)
    assert module.hidden_size == checkpoint.hidden_size == 48
    assert_same(run(module, rows, feature_ND, [list(range(len(TREE)))]), expected_ND)
    del draft.tensors["embed_tokens.weight"]
    with pytest.raises(FieldError, match=r"lacks the tensor embed_tokens\.weight"):
        opened(draft, tmp_path / "without", target)


def test_eagle3_over_the_whole_vocabulary_needs_no_map(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.eagle3(target)
    del draft.tensors["d2t"], draft.tensors["t2d"], draft.tensors["lm_head.weight"], draft.config["draft_vocab_size"]
    module = load(opened(draft, tmp_path, target), target)
    hidden_nD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    normed_nD = reference.rms(hidden_nD, draft.tensors["norm.weight"])
    assert_same(module.logits(hidden_nD), normed_nD @ target_weights(target)["lm_head.weight"].T)


def test_layers_named_by_the_checkpoint_are_read_and_normed(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.speculators_eagle3(target, reads=[0, 8], norm_before_residual=False, norm_before_fc=True)
    draft.tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 64)
    checkpoint = opened(draft, tmp_path, target)
    assert checkpoint.reads == (0, 8)
    features_NF = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    normed_NF = reference.rms(features_NF, draft.tensors["input_norm.weight"])
    assert_same(load(checkpoint, target).fuse(features_NF), normed_NF @ draft.tensors["fc.weight"].T)


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "model.safetensors"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_is_its_formula(tmp_path: Path, target: Checkpoint, file: str, layers: int) -> None:
    draft = speculators.medusa(target, heads=5, layers=layers)
    checkpoint = opened(draft, tmp_path, target, file)
    assert (checkpoint.kind, checkpoint.reads, checkpoint.heads, checkpoint.layers) == ("medusa", (8,), 5, layers)
    module, hidden_nD = load(checkpoint, target), torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert module.heads == 5
    for head in range(5):
        assert_same(module.head_logits(head, hidden_nD), reference.medusa(draft.tensors, head, layers, hidden_nD))


def test_medusa_as_vllm_stores_it(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.vllm_medusa(target)
    checkpoint = opened(draft, tmp_path, target)
    assert (checkpoint.heads, checkpoint.layers, checkpoint.draft_vocab_size) == (3, 2, DRAFTED)
    module, hidden_nD = load(checkpoint, target), torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    same = {}
    for head in range(3):
        for layer in range(2):
            same[f"{head}.{layer}.linear.weight"] = draft.tensors[f"blocks.{head}.layers.{layer}.weight"]
            same[f"{head}.{layer}.linear.bias"] = torch.zeros(32)
        same[f"{head}.2.weight"] = draft.tensors[f"lm_heads.{head}.weight"]
        logits_nv = reference.medusa(same, head, 2, hidden_nD)
        assert_same(module.head_logits(head, hidden_nD), reference.scattered(logits_nv, DRAFTED_IDS, VOCAB))


@pytest.mark.parametrize("architecture", ["llama_tied", "gemma2", "granite"])
def test_head_and_embedding_of_the_target(tmp_path: Path, architecture: str) -> None:
    """The head with the target's own cap and scale; the embedding as stored, without the target's scale."""
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", architecture)))
    draft = speculators.eagle(target)
    del draft.tensors["embed_tokens.weight"]
    module = load(opened(draft, tmp_path / "draft", target), target)
    weights = target_weights(target)
    embedding = weights["model.embed_tokens.weight"]
    hidden_nD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    logits_nV = hidden_nD @ weights.get("lm_head.weight", embedding).T
    expected = {"llama_tied": logits_nV, "gemma2": torch.tanh(logits_nV / 8) * 8, "granite": logits_nV / 2}
    assert_same(module.logits(hidden_nD), expected[architecture])
    assert_same(module.embed_tokens(torch.tensor([5, 9])), embedding[[5, 9]])


@pytest.mark.parametrize("make", [speculators.eagle, speculators.eagle3, speculators.medusa])
def test_other_types_and_packed_layers(tmp_path: Path, target: Checkpoint, make) -> None:
    checkpoint = opened(make(target), tmp_path, target)
    module = checkpoint.load(target, "bfloat16", "cpu")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in module.parameters())
    pack(module, "none")
    hidden_nD = torch.zeros(1, 32, dtype=torch.bfloat16)
    logits = module.head_logits(0, hidden_nD) if checkpoint.kind == "medusa" else module.logits(hidden_nD)
    assert (logits.dtype, logits.shape) == (torch.float32, (1, VOCAB))
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        checkpoint.load(target, "int8", "cpu")


@pytest.mark.parametrize("make", [speculators.eagle, speculators.eagle3, speculators.medusa])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_drafter_in_whole_numbers_says_nearly_the_same(
    tmp_path: Path, target: Checkpoint, make, quantization: str
) -> None:
    checkpoint = opened(make(target), tmp_path, target)
    modules = [checkpoint.load(target, "float32", "cpu") for _ in range(2)]
    pack(modules[1], quantization)
    assert not any(type(one) is torch.nn.Linear for one in modules[1].modules())
    hidden_nD = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    floats, whole = (
        one.head_logits(0, hidden_nD) if checkpoint.kind == "medusa" else one.logits(hidden_nD) for one in modules
    )
    drafted = floats.isfinite()
    assert torch.equal(drafted, whole.isfinite())
    off = (floats - whole)[drafted].abs().mean() / floats[drafted].std()
    assert 0 < off < {"int8": 0.02, "int4": 0.2}[quantization]


def test_a_map_to_tokens_that_the_target_lacks_is_refused(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.eagle3(target)
    draft.tensors["d2t"][-1] = 500
    with pytest.raises(FieldError, match=f"d2t leads to token {500 + DRAFTED - 1}; the target has {VOCAB}"):
        load(opened(draft, tmp_path / "far", target), target)
    draft = speculators.vllm_medusa(target)
    draft.tensors["token_map"][0] = draft.tensors["token_map"][1]
    with pytest.raises(FieldError, match="token_map leads to one token of the target from two"):
        load(opened(draft, tmp_path / "twice", target), target)


def test_what_is_known_of_a_checkpoint_cannot_change(tmp_path: Path, target: Checkpoint) -> None:
    checkpoint = opened(speculators.eagle(target), tmp_path, target)
    with pytest.raises(dataclasses.FrozenInstanceError):
        checkpoint.reads = (0,)  # type: ignore[misc]


LEVELS = [3, 2, 2, 1, 0, 1, 0, 0]
"""Levels of the rows of ``TREE``."""


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_spd_is_its_formula(tmp_path: Path, target: Checkpoint, layers: int, normed: bool) -> None:
    draft = speculators.spd(target, layers=layers, normed=normed)
    checkpoint = opened(draft, tmp_path, target, draft.file)
    assert (checkpoint.kind, checkpoint.reads, checkpoint.depth) == ("spd", (2, 4, 7), layers)
    assert (checkpoint.stages, checkpoint.draft_vocab_size) == (None, DRAFTED)
    check_spd(target, draft, checkpoint, layers)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_papers_spd_is_its_formula(tmp_path: Path, target: Checkpoint, layers: int) -> None:
    draft = speculators.spd_paper(target, layers=layers)
    checkpoint = opened(draft, tmp_path, target, draft.file)
    assert (checkpoint.kind, checkpoint.stages, checkpoint.depth) == ("spd", 3, layers)
    assert checkpoint.levels[1:] == tuple(map(tuple, draft.config["shallow_hidden_layer_indices"][::-1]))
    check_spd(target, draft, checkpoint, layers)


def test_the_early_exit_is_spd_with_one_anchor(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.early_exit(target, layer=3)
    checkpoint = opened(draft, tmp_path, target, draft.file)
    assert (checkpoint.kind, checkpoint.reads, checkpoint.levels) == ("early_exit", (3,), ((3,),))
    check_spd(target, draft, checkpoint, 1)


def check_spd(target: Checkpoint, draft: Draft, checkpoint: SpeculatorCheckpoint, layers: int) -> None:
    """Rows at all levels at once, and rows that enter one after another, which see the same where no level changes."""
    module = load(checkpoint, target)
    rows = Rows(TREE, 32 * len(checkpoint.reads))
    levels = [min(level, len(checkpoint.levels) - 1) for level in LEVELS]
    weights = target_weights(target)
    parts = rows.features_NF.chunk(len(checkpoint.reads), dim=-1)
    features = []
    for i, level in enumerate(levels):
        states = [
            parts[checkpoint.reads.index(k)][i] if k else weights["model.embed_tokens.weight"][rows.tokens_N[i]]
            for k in checkpoint.levels[level]
        ]
        features.append(reference.spd_feature(draft.tensors, level, states, checkpoint.stages))
        fused = module.fuse(level, rows.tokens_N[i : i + 1], rows.features_NF[i : i + 1])[0]
        assert_same(fused, features[-1])
    feature_ND, levels_N = torch.stack(features), torch.tensor(levels)
    given = (levels, rows.positions_N, rows.sees_NN, THETA, checkpoint.stages)
    expected_ND = reference.spd(draft.tensors, feature_ND, *given)
    for batches in at_once_and_apart(rows):
        arenas = Arenas(CAPACITY)
        for batch in batches:
            attend = SlotAttention(arenas, Plan(rows.view(batch), torch.device("cpu"), in_place=True), folded_kernel)
            output = module(feature_ND[batch], levels_N[batch], rows.positions_N[batch], attend)
            assert_same(output, expected_ND[batch])
    logits = reference.rms(expected_ND, weights["model.norm.weight"], reference.TARGETS_EPS)
    logits = logits @ draft.tensors["lm_head.weight"].T
    if checkpoint.draft_ids is not None:
        logits = reference.scattered(logits, DRAFTED_IDS, VOCAB)
    assert_same(module.logits(expected_ND), logits)
