"""Block drafters compute what a plain reference does, from every layout, and read the states that their files name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config import FieldError
from penstock.messages import CONTEXT, KEPT, PATH, Batch, Features, Opened, Rows, Sampling
from penstock.models.speculators.block import BlockStage
from penstock.models.speculators.block_format import BlockCheckpoint
from penstock.models.speculators.open import load_speculator_stage, open_speculator
from penstock.noise import gumbel
from penstock.stage.driver import StageCore
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint
from tests.speculators import BLOCK, COMPARED, DRAFTED, FIRST_DRAFTED, MASK, RANK, SECOND, Draft
from tests.unit.models import blocks_reference as reference
from tests.unit.models.asked_blocks import CAPACITY, NAMED_TAPS, Text, asked

EPS, THETA = 1e-5, 10000.0
LAYOUTS: dict[str, tuple[Callable[[Checkpoint], Draft], tuple[bool, bool], tuple[int | None, int | None], bool]] = {
    "dflash": (speculators.dflash, (False, False), (None, None), False),
    "sliding_dflash": (speculators.sliding_dflash, (True, False), (7, None), False),
    "jetspec": (speculators.jetspec, (True, True), (None, None), False),
    "speculators_dflash": (speculators.speculators_dflash, (False, False), (None, None), False),
    "anchored_dflash": (speculators.anchored_dflash, (False, False), (None, None), True),
    "dspark": (speculators.dspark, (False, False), (None, None), True),
    "gated_dspark": (speculators.gated_dspark, (False, False), (None, None), True),
    "speculators_dspark": (speculators.speculators_dspark, (False, False), (None, None), True),
    "headrace": (speculators.headrace, (True, True), (None, None), True),
    "dflash2": (speculators.dflash2, (False, False), (None, None), False),
    "sliding_dflash2": (speculators.sliding_dflash2, (False, False), (7, 7), False),
    "speculators_dflash2": (speculators.speculators_dflash2, (False, False), (None, None), False),
}
"""Layout: its maker, which layers are causal within a block, their windows, and whether rows say what follows them."""

CHAINED = ("dspark", "headrace", "dflash2")
"""Parts of the names of layouts that draft nothing before the token before is known."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=8)))


def expected(
    draft: Draft,
    target: Checkpoint,
    layout: str,
    text: Text,
    known: int,
    levels: int,
    *,
    causal: Sequence[bool] | None = None,
    windows: Sequence[int | None] | None = None,
    swapped: bool = False,
    mask: int = MASK,
    rows: int = BLOCK,
    theta: float = THETA,
    eps: float = EPS,
    compared: int = COMPARED,
    noise: np.ndarray | None = None,
    partial: np.ndarray | None = None,
) -> list[np.ndarray]:
    """The reference's log chances [V] of each level; ``swapped``: the layers' kinds in reverse order.

    ``noise`` [V] is added to the scores of all tokens, at temperature 1. ``partial`` [shown, F] are the states of the
    tokens shown, as far as they have got.
    """
    _, usual, spans, from_anchor = LAYOUTS[layout]
    order = slice(None, None, -1 if swapped else 1)
    causal, windows = (causal or usual)[order], (windows or spans)[order]
    own = load_file(target.path / "model.safetensors")
    t = {name: tensor.double().numpy() for name, tensor in draft.tensors.items()}
    embedding = t.get("embed_tokens.weight", own["model.embed_tokens.weight"].double().numpy())
    head = t.get("lm_head.weight", own["lm_head.weight"].double().numpy())
    path = text.tokens[known:]
    rows = max(rows, len(path) + (not from_anchor))
    hidden = reference.block(
        t,
        embedding,
        text.states[:known].double().numpy(),
        range(known),
        [*path, *[mask] * (rows - len(path))],
        known,
        causal=causal,
        windows=windows,
        theta=theta,
        eps=eps,
        partial=partial,
    )
    found = []
    for row in range(len(path) - from_anchor, len(path) - from_anchor + levels):
        logits = hidden[row] @ head.T
        if "markov_head.markov_w1.weight" in t:
            logits = logits + reference.markov(t, hidden[row], path[row])
        if len(logits) < VOCAB:
            whole = np.full(VOCAB, -np.inf)
            whole[[FIRST_DRAFTED + 2 * i for i in range(DRAFTED)]] = logits
            logits = whole
        if noise is not None:
            logits = logits + noise
        if "candidate_selector.hidden_projection.weight" in t:
            best = np.argsort(-logits)[:compared].tolist()
            logits = reference.selector(t, logits, hidden[row], path[row - 1], best)
        found.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shown", [1, 3, 6], ids=["root", "in flight", "longer than a block"])
@pytest.mark.parametrize("length", [9, 18])
def test_a_block_is_its_reference(tmp_path: Path, target: Checkpoint, layout: str, shown: int, length: int) -> None:
    draft = LAYOUTS[layout][0](target)
    folder = draft.save(tmp_path)
    stage = load_speculator_stage(str(folder), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu")
    assert isinstance(stage, BlockStage)
    text, known = Text(length), length - shown
    answers = asked(stage, text, known, VOCAB, BLOCK)
    from_anchor = LAYOUTS[layout][3]
    levels = max(BLOCK, shown + (not from_anchor)) - shown + from_anchor
    assert len(answers) == (1 if any(name in layout for name in CHAINED) else levels), "it has to know the token before"
    compare(answers, expected(draft, target, layout, text, known, len(answers)))


def compare(answers: Sequence[tuple[list[int], list[float]]], levels: Sequence[np.ndarray]) -> None:
    for (tokens, scores), chances in zip(answers, levels, strict=True):
        assert len(tokens) == np.isfinite(chances).sum()
        np.testing.assert_allclose(scores, chances[tokens], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_files_names_lead_to_the_outputs_of_the_same_layers(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    """z-lab counts layers, speculators hidden states; a target whose layer k puts out k shows which is read."""
    speculator = open_speculator(str(LAYOUTS[layout][0](target).save(tmp_path)), target)
    outputs = [None, *range(target.num_layers)]  # by hidden state, of which the first is the embedding
    assert [outputs[state] for state in speculator.reads] == [1, 4, 6]
    assert isinstance(speculator, BlockCheckpoint)
    assert (speculator.shape.causal, speculator.shape.windows) == LAYOUTS[layout][1:3]
    assert (speculator.shape.size, speculator.shape.mask_token) == (BLOCK, MASK)
    assert speculator.kind == next(kind for kind in ("jetspec", "dspark", "headrace", "dflash") if kind in layout)


@pytest.mark.parametrize("there", list(itertools.product((False, True), repeat=3)), ids=str)
def test_tokens_in_flight_are_read_with_the_states_that_have_come(
    tmp_path: Path, target: Checkpoint, there: tuple[bool, ...]
) -> None:
    """The second of four tokens shown has these states and the third all; states of other nodes do not count."""
    draft = speculators.headrace(target)
    stage = load_speculator_stage(
        str(draft.save(tmp_path)), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu"
    )
    assert isinstance(stage, BlockStage)
    text, known, width = Text(12), 8, 32
    partial = np.zeros((4, 3 * width))
    for i, layer in enumerate(NAMED_TAPS):
        own = text.states[9:11, i * width : (i + 1) * width]
        rows = [9, 10] if there[i] else [10]
        stage.add_features(
            Features(layers=[layer], nodes=[text.node(r) for r in rows], slots=[text.slots[r] for r in rows], width=32),
            own[-len(rows) :],
        )
        # The slot of the last token still has the states of a node that was there before, which overflowed.
        old = Features(layers=[layer], nodes=[999], slots=[text.slots[11]], width=32)
        stage.add_features(old, torch.full((1, width), torch.inf))
        for row in rows:
            partial[row - known, i * width : (i + 1) * width] = own[row - 9]
    answers = asked(stage, text, known, VOCAB, 0)
    compare(answers, expected(draft, target, "headrace", text, known, 1, partial=partial))
    with pytest.raises(AssertionError):
        compare(answers, expected(draft, target, "headrace", text, known, 1))


def test_the_embedding_is_layer_minus_one(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.dflash(target, taps=(-1, 3, 7))
    assert open_speculator(str(draft.save(tmp_path)), target).reads == (0, 4, 8)


def test_a_lost_context_is_hidden(tmp_path: Path, target: Checkpoint) -> None:
    """A slot that has got another node since is no part of the context, and the others stay."""
    draft = speculators.dflash(target)
    stage = load_speculator_stage(
        str(draft.save(tmp_path)), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu"
    )
    assert isinstance(stage, BlockStage)
    text = Text(9)
    first = asked(stage, text, 8, VOCAB, 0)
    stage._context_of[text.slots[:3]] = 0
    stage.store.forget()
    stage._node_at[text.slots[:3]] = [text.node(i) for i in range(3)]
    again = asked_again(stage, text)
    t = {name: tensor.double().numpy() for name, tensor in draft.tensors.items()}
    own = load_file(target.path / "model.safetensors")
    hidden = reference.block(
        t,
        own["model.embed_tokens.weight"].double().numpy(),
        text.states[3:8].double().numpy(),
        range(3, 8),
        [text.tokens[8], *[MASK] * (BLOCK - 1)],
        8,
        causal=(False, False),
        windows=(None, None),
        theta=THETA,
        eps=EPS,
    )
    logits = hidden[1] @ own["lm_head.weight"].double().numpy().T
    chances = logits - np.log(np.exp(logits).sum())
    (tokens, scores), (before, _) = again[0], first[0]
    np.testing.assert_allclose(scores, chances[tokens], atol=1e-5, rtol=1e-5)
    assert tokens != before


@pytest.mark.parametrize("layout", ["gated_dspark", "dflash2"])
def test_levels_below_a_block_are_answered_by_the_nodes_own_token(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    """Two children and a chain below one, without a block of their own; the last is further than the block reaches."""
    draft = LAYOUTS[layout][0](target)
    stage = load_speculator_stage(
        str(draft.save(tmp_path)), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu"
    )
    assert isinstance(stage, BlockStage)
    text = Text(15)
    core = StageCore(stage, CAPACITY, is_last=True)
    core.reader = stage
    first = asked(stage, text, 8, VOCAB, 0, core=core, until=9)
    assert len(first) == 1
    rows = Rows()
    for place, parent, position in ((9, 8, 9), (10, 8, 9), (11, 9, 10), (12, 11, 11), (13, 12, 12), (14, 13, 13)):
        rows.append(7, text.node(place), text.slots[place], text.slots[parent], position, text.tokens[place])
    batch = Batch(stream=1, rows=rows, wanted=list(range(6)), candidates=VOCAB, feature_levels=[KEPT] * 6)
    batch.alive = list(range(6))
    stage._block = lambda *_: pytest.fail("a block was computed")  # type: ignore[method-assign]
    answers = core.process(batch, None)[3]
    # DSpark's rows say what follows them: its block of as many rows reaches one level further.
    reached, lag = ((9, 10, 11, 12, 13), 0) if layout == "gated_dspark" else ((9, 10, 11, 12), 1)
    assert [answer.node for answer in answers] == [text.node(place) for place in reached]
    t = {name: tensor.double().numpy() for name, tensor in draft.tensors.items()}
    own = {name: tensor.double().numpy() for name, tensor in load_file(target.path / "model.safetensors").items()}
    hidden = reference.block(
        t,
        own["model.embed_tokens.weight"],
        text.states[:8].double().numpy(),
        range(8),
        [text.tokens[8], *[MASK] * (BLOCK - 1)],
        8,
        causal=(False, False),
        windows=(None, None),
        theta=THETA,
        eps=EPS,
    )
    for answer, row, place in zip(answers, (1, 1, 2, 3, 4)[: len(reached)], reached, strict=True):
        state = hidden[row + lag]
        logits = state @ own["lm_head.weight"].T
        if lag:
            best = np.argsort(-logits)[:COMPARED].tolist()
            logits = reference.selector(t, logits, state, text.tokens[place], best)
        else:
            logits = logits + reference.markov(t, state, text.tokens[place])
        chances = logits - np.log(np.exp(logits).sum())
        assert len(answer.tokens) == np.isfinite(chances).sum()
        np.testing.assert_allclose(answer.scores, chances[answer.tokens], atol=1e-5, rtol=1e-5)


def test_the_selector_compares_the_best_of_logits_and_noise(tmp_path: Path, target: Checkpoint) -> None:
    """At T = 1 the position's noise decides which tokens are compared: other tokens than those of the logits alone."""
    draft, text = speculators.dflash2(target), Text(12)
    stage = load_speculator_stage(
        str(draft.save(tmp_path)), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu"
    )
    assert isinstance(stage, BlockStage)
    for seed in range(3):
        noise = gumbel(seed, 0, len(text.tokens), VOCAB)
        stage.forget()
        answers = asked(stage, text, 10, VOCAB, 0, sampling=Sampling(seed=seed, temperature=1.0))
        compare(answers, expected(draft, target, "dflash2", text, 10, 1, noise=noise))
        with pytest.raises((AssertionError, KeyError)):
            compare(answers, expected(draft, target, "dflash2", text, 10, 1))


def test_a_row_for_which_no_token_is_left_has_no_candidates(tmp_path: Path, target: Checkpoint) -> None:
    """A drafter that can draft every second token alone, where another is allowed: it has nothing to compare."""
    folder = speculators.speculators_dflash2(target).save(tmp_path)
    stage = load_speculator_stage(str(folder), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu")
    assert isinstance(stage, BlockStage)
    answers = asked(stage, Text(12), 10, VOCAB, 0, sampling=Sampling(allowed_token_ids=(FIRST_DRAFTED + 1,)))
    assert answers == [([], [])]
    stage.forget()
    two = FIRST_DRAFTED, FIRST_DRAFTED + 2
    ((tokens, scores),) = asked(stage, Text(12), 10, VOCAB, 0, sampling=Sampling(allowed_token_ids=two))
    assert sorted(tokens) == list(two)
    np.testing.assert_allclose(np.exp(scores).sum(), 1.0)


def asked_again(stage: BlockStage, text: Text) -> list[tuple[list[int], list[float]]]:
    """The candidates after the last token, of what the stage still has."""
    core = StageCore(stage, CAPACITY, is_last=True)
    rows, every = Rows(), range(len(text.tokens))
    for i in every:
        rows.append(7, text.node(i), text.slots[i], text.slots[i - 1] if i else -1, i, text.tokens[i])
    batch = Batch(stream=0, opened=[Opened(7, Sampling())], rows=rows, wanted=[every[-1]], candidates=VOCAB)
    batch.alive, batch.feature_levels = list(every), [PATH] * len(every)
    return [(answer.tokens, answer.scores) for answer in core.process(batch, None)[3]]


@pytest.mark.parametrize("layout", ["dflash", "dflash2"])
def test_blocks_of_a_tree_are_those_of_each_path(tmp_path: Path, target: Checkpoint, layout: str) -> None:
    """Two leaves of one batch, more blocks than one pass takes, see their own paths alone."""
    draft = LAYOUTS[layout][0](target)
    made = [
        load_speculator_stage(
            str(draft.save(tmp_path / str(i))), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu"
        )
        for i in range(3)
    ]
    whole = Text(12)
    found = {leaf: branch(made[0], whole, (10, 11))[leaf] for leaf in (0, 1)}
    for leaf, other in ((0, 10), (1, 11)):
        alone = branch(made[leaf + 1], whole, (other,))[0]
        assert found[leaf][0] == alone[0]
        np.testing.assert_allclose(found[leaf][1], alone[1], atol=1e-6)


def branch(stage: object, text: Text, leaves: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Candidates after each of the leaves, whose tokens are those at these places of the text, all below the tenth."""
    assert isinstance(stage, BlockStage)
    core = StageCore(stage, CAPACITY, is_last=True)
    core.reader = stage
    nodes = [text.node(i) for i in range(9)]
    stage.add_features(Features(layers=list(NAMED_TAPS), nodes=nodes, slots=text.slots[:9], width=96), text.states[:9])
    rows = Rows()
    for i in range(10):
        rows.append(7, text.node(i), text.slots[i], text.slots[i - 1] if i else -1, i, text.tokens[i])
    for leaf in leaves:
        rows.append(7, text.node(leaf), text.slots[leaf], text.slots[9], 10, text.tokens[leaf])
    batch = Batch(stream=0, opened=[Opened(7, Sampling())], rows=rows, candidates=VOCAB)
    batch.wanted = list(range(10, 10 + len(leaves)))
    batch.alive = list(range(10 + len(leaves)))
    batch.feature_levels = [CONTEXT] * 9 + [PATH] * (1 + len(leaves))
    return [(answer.tokens, answer.scores) for answer in core.process(batch, None)[3]]


def set_at(draft: Draft, path: str, value: object) -> None:
    """Set a field of the configuration, or of a table in it; None removes it."""
    *tables, name = path.split(".")
    table = draft.config
    for one in tables:
        table = table[one]
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value


SPARK = {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6], "projector_type": "dspark", "markov_rank": RANK}
SPARK |= {"markov_head_type": "gated"}
REFUSED = [
    ("dflash", "hidden_size", 64, "hidden_size is 64, the target's 32"),
    ("dflash", "intermediate_size", 44, r"mlp\.gate_proj\.weight is \[40, 32\].* ask for \[44, 32\]"),
    ("dflash", "num_hidden_layers", 3, "layer_types is .* for 3 layers"),
    ("dflash", "num_hidden_layers", 1, r"layers\.1\..*, which no layout|layer_types is"),
    ("dflash", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; the file holds"),
    ("dflash", "num_attention_heads", 8, r"q_proj\.weight is \[32, 32\].* ask for \[64, 32\]"),
    ("dflash", "num_key_value_heads", 4, r"k_proj\.weight is \[16, 32\].* ask for \[32, 32\]"),
    ("dflash", "head_dim", None, r"proj\.weight is .* ask for \["),
    ("dflash", "hidden_act", "swish9", r"hidden_act is \"swish9\"; it has to be one of"),
    ("dflash", "rope_theta", "10000", r"rope_theta is \"10000\"; it has to be a finite number, above 0"),
    ("dflash", "vocab_size", 170, "vocab_size is 170, the target's 160"),
    ("dflash", "attention_bias", True, "attention_bias is True, which the file's tensors contradict"),
    ("dflash", "layer_types", ["full_attention"], "layer_types is .* for 2 layers"),
    ("dflash", "layer_types", ["full_attention", "linear_attention"], "layer_types is .* for 2 layers"),
    ("dflash", "layer_types", ["full_attention", "sliding_attention"], "sliding_window is None .* though layers slide"),
    ("dflash", "block_size", 1, "block_size is 1; it has to be an integer of 2 or more"),
    ("dflash", "block_size", 513, "block_size is 513; at most 512 rows are computed at once"),
    ("dflash", "block_size", "5", "block_size is '5'; it has to be an integer"),
    ("dflash", "num_target_layers", 9, "num_target_layers is 9, the target's layers are 8"),
    ("dflash", "dflash_config", 3, "dflash_config is 3; it has to be a table"),
    ("dflash", "dflash_config.block_size", 6, "block_size is 5, and in dflash_config 6"),
    ("dflash", "dflash_config.mask_token_id", None, "mask_token_id is None; it has to be an integer"),
    ("dflash", "dflash_config.mask_token_id", 160, "mask_token_id is 160; the target has 160"),
    ("dflash", "dflash_config.target_layer_ids", None, "target_layer_ids is None; .* a list of integers, -1 to 7"),
    ("dflash", "dflash_config.target_layer_ids", [1, 4, 8], r"target_layer_ids is \[1, 4, 8\]; .* -1 to 7"),
    ("dflash", "dflash_config.target_layer_ids", [1, 4], r"fc\.weight is \[32, 96\].* ask for \[32, 64\]"),
    ("dflash", "dflash_config.causal_head", "yes", "causal_head is 'yes'; it has to be true or false"),
    ("dflash", "is_causal", 1, "is_causal is 1; it has to be true or false"),
    (
        "dflash",
        "dflash_config.projector_type",
        "other",
        "projector_type is 'other'; only 'dflash', 'dspark' and 'headrace'",
    ),
    ("dflash", "dflash_config.attention_mode", "mla", "attention_mode is 'mla'; only 'gqa'"),
    ("dflash", "dflash_config.input_embedding_scale", 2.0, r"input_embedding_scale is 2\.0, which is not supported"),
    ("dflash", "dflash_config.output_multiplier", 2.0, r"output_multiplier is 2\.0, which is not supported"),
    ("dflash", "dflash_config.draft_shift", True, "draft_shift is True, which is not supported"),
    ("dflash", "dflash_config.final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0, the target's is None"),
    ("dflash", "dflash_config.emb_dim", 8, r"dflash_config\.emb_dim is 8, which is not known here"),
    ("sliding_dflash", "use_sliding_window", False, "though layers slide"),
    ("sliding_dflash", "sliding_window", 4, "the window has to be at least the block's 5"),
    ("sliding_dflash", "layer_types", None, "sliding_window is set without layer_types"),
    ("speculators_dflash", "transformer_layer_config", 3, "transformer_layer_config is 3; it has to be a table"),
    ("speculators_dflash", "transformer_layer_config.hidden_size", 64, "hidden_size is 64, the target's 32"),
    ("speculators_dflash", "draft_vocab_size", 50, r"lm_head\.weight is \[60, 32\].* ask for \[50, 32\]"),
    ("speculators_dflash", "block_size", None, "block_size is None; it has to be an integer"),
    ("speculators_dflash", "aux_hidden_state_layer_ids", [2, 5, 9], "aux_hidden_state_layer_ids is .* 0 to 8"),
    ("speculators_dflash", "sample_from_anchor", "no", "sample_from_anchor is 'no'; it has to be true or false"),
    ("speculators_dflash", "target_hidden_size", 64, "target_hidden_size is 64, the target's width 32"),
    ("dspark", "markov_rank", 7, r"confidence_head.* is \[1, 38\].* ask for \[1, 39\]"),
    ("dspark", "markov_rank", None, "markov_rank is None; it has to be an integer"),
    ("dspark", "markov_head_type", "rnn", "markov_head_type is 'rnn'; 'vanilla' and 'gated' are supported"),
    ("dspark", "markov_head_type", "gated", r"lacks the tensor markov_head\.gate_proj\.weight"),
    ("dspark", "confidence_head_with_markov", False, r"confidence_head.* is \[1, 38\].* ask for \[1, 32\]"),
    ("dspark", "target_layer_ids", [1, 4, 8], "target_layer_ids is .* -1 to 7"),
    ("dspark", "block_size", None, "block_size is None; it has to be an integer"),
    ("dflash2", "dflash_config.conv_kernel_size", 3, r"base_kernel is \[2, 2, 32\].* ask for \[2, 3, 32\]"),
    (
        "dflash2",
        "dflash_config.conv_kernel_size",
        10**9,
        r"base_kernel is \[2, 2, 32\].* ask for \[2, 1000000000, 32\]",
    ),
    ("dflash2", "dflash_config.conv_group_size", 16, r"kernel_projection.* is \[16, 32\].* ask for \[8, 32\]"),
    ("dflash2", "dflash_config.conv_group_size", 5, "conv_group_size is 5; it has to divide hidden_size, 32"),
    ("dflash2", "dflash_config.selector_rank", 7, r"codebook is \[160, 6\].* ask for \[160, 7\]"),
    ("dflash2", "dflash_config.selector_top_k", 161, "selector_top_k is 161; the target has 160 tokens"),
    ("dflash2", "dflash_config.projector_type", "dspark", "markov_head_type is None"),
    ("gated_dspark", "dflash_config.selector_rank", 6, "conv_kernel_size is None; it has to be an integer"),
    ("gated_dspark", "dflash_config", {**SPARK, **SECOND}, "both a Markov head and DFlash 2's selector: remove"),
    ("dflash", "dflash_config.selector_rank", 6, "conv_kernel_size is None; it has to be an integer"),
    ("dflash", "architectures", ["DFlash2DraftModel"], "conv_kernel_size is None; it has to be an integer"),
    ("speculators_dflash2", "selector_top_k", "7", "selector_top_k is '7'; it has to be an integer"),
    *(("dflash2", f"dflash_config.{name}", None, f"{name} is None; it has to be an integer of 1") for name in SECOND),
    *(("dflash2", f"dflash_config.{name}", 0, f"{name} is 0; it has to be an integer of 1") for name in SECOND),
    *(("dflash2", f"dflash_config.{name}", 2.0, rf"{name} is 2\.0; it has to be an integer of 1") for name in SECOND),
    ("speculators_dspark", "draft_vocab_size", 50, r"markov_w2\.weight is \[60, 6\].* ask for \[50, 6\]"),
    ("speculators_dspark", "draft_vocab_size", 161, "drafts 161 tokens, the target knows 160"),
    ("speculators_dflash", "projector_type", "domino", "a drafter of kind Domino, which is not supported"),
]
"""Layout, field of the configuration, what is written there, and how it is refused."""


def check_field_refused(draft: Draft, folder: Path, target: Checkpoint, path: str, value: object, message: str) -> None:
    """The drafter with ``value`` in a field of its configuration is refused with this message, a pattern."""
    set_at(draft, path, value)
    with pytest.raises(FieldError, match=r"^speculative_config\.model is .*" + message):
        open_speculator(str(draft.save(folder)), target)


@pytest.mark.parametrize(("layout", "path", "value", "message"), REFUSED)
def test_a_field_that_does_not_fit_is_refused_by_its_name(
    tmp_path: Path, target: Checkpoint, layout: str, path: str, value: object, message: str
) -> None:
    check_field_refused(LAYOUTS[layout][0](target), tmp_path, target, path, value, message)


@pytest.mark.parametrize("layout", ["dflash", "speculators_dflash", "gated_dspark", "speculators_dspark", "dflash2"])
def test_a_tensor_that_is_missing_misshapen_or_strange_is_refused_by_its_name(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    made = LAYOUTS[layout][0](target)
    for number, name in enumerate(made.tensors):
        draft = LAYOUTS[layout][0](target)
        draft.tensors[name] = torch.ones(3, 5)
        with pytest.raises(FieldError, match=name.replace(".", r"\.") + r" is \[3, 5\]"):
            open_speculator(str(draft.save(tmp_path / f"{number}-shape")), target)
        del draft.tensors[name]
        if name not in ("t2d", "embed_tokens.weight") and not name.startswith("confidence_head"):
            with pytest.raises(FieldError, match="lacks the tensor " + name.replace(".", r"\.")):
                open_speculator(str(draft.save(tmp_path / f"{number}-missing")), target)
    made.tensors["prefix_gru.weight_ih_l0"] = torch.ones(3)
    with pytest.raises(FieldError, match=r"holds the tensor prefix_gru\.weight_ih_l0, which no layout"):
        open_speculator(str(made.save(tmp_path / "strange")), target)


def problem_of(folder: Path, target: Checkpoint) -> str:
    """Why a drafter is refused; empty if it opens."""
    try:
        open_speculator(str(folder), target)
    except FieldError as error:
        return str(error)
    return ""


WRONG: tuple[object, ...] = (None, -1, 0, 1, 1.5, True, 10**9, "2", [], ["2"], {"2": 2})


@pytest.mark.parametrize("layout", ["dflash2", "speculators_dflash2"])
def test_every_field_with_any_value_is_followed_or_refused_by_its_name(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    """Where a value fits nothing in the file, the tensor that contradicts it is named."""
    made = LAYOUTS[layout][0](target)
    folder, refused = made.save(tmp_path), set()
    tables = {name: value for name, value in made.config.items() if isinstance(value, dict)}
    fields = [*made.config, *(f"{table}.{name}" for table, inner in tables.items() for name in inner)]
    for path, value in itertools.product(fields, WRONG):
        draft = LAYOUTS[layout][0](target)
        set_at(draft, path, value)
        (folder / "config.json").write_text(json.dumps(draft.config))
        if problem := problem_of(folder, target):
            name = path.rpartition(".")[2]
            names = "|".join([name, *tables.get(name, ())])  # without a table its fields are missing
            others = (
                r" ask for \[|(lacks|holds) the tensor|config\.json cannot be used|attention heads$|it drafts \d|DFlash"
            )
            assert re.search(rf"\b({names})\b|{others}", problem), path
            refused.add(name)
    assert refused >= {*SECOND, "mask_token_id", "block_size", "hidden_size", "num_hidden_layers"}


FOLLOWED: list[tuple[str, str, object, dict[str, Any]]] = [
    ("dflash", "rms_norm_eps", 0.5, {"eps": 0.5}),
    ("dflash", "rope_theta", 50.0, {"theta": 50.0}),
    ("dflash", "is_causal", True, {"causal": (True, True)}),
    ("dflash", "dflash_config.causal_head", True, {"causal": (True, True)}),
    ("sliding_dflash", "is_causal", False, {"causal": (False, False)}),
    ("sliding_dflash", "sliding_window", 9, {"windows": (9, None)}),
    ("sliding_dflash", "layer_types", ["full_attention", "sliding_attention"], {"swapped": True}),
    ("dflash", "dflash_config.mask_token_id", 9, {"mask": 9}),
    ("dflash", "block_size", 7, {"rows": 7}),
    ("dflash2", "dflash_config.selector_top_k", 3, {"compared": 3}),
    ("dflash2", "is_causal", True, {"causal": (True, True)}),
    ("dflash2", "rope_parameters.rope_theta", 50.0, {"theta": 50.0}),
]
"""Layout, field of the configuration, what is written there, and what the reference then takes."""


@pytest.mark.parametrize(("layout", "path", "value", "taken"), FOLLOWED)
def test_a_field_that_is_followed_changes_what_the_reference_says_it_changes(
    tmp_path: Path, target: Checkpoint, layout: str, path: str, value: object, taken: dict[str, Any]
) -> None:
    draft = LAYOUTS[layout][0](target)
    set_at(draft, path, value)
    stage = load_speculator_stage(
        str(draft.save(tmp_path)), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu"
    )
    assert isinstance(stage, BlockStage)
    text = Text(18)
    answers = asked(stage, text, 16, VOCAB, 9)
    compare(answers, expected(draft, target, layout, text, 16, len(answers), **taken))
    with pytest.raises((AssertionError, IndexError)):  # the latter where a block has more rows than expected
        compare(answers, expected(draft, target, layout, text, 16, len(answers)))
