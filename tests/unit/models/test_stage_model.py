"""A stage as the stage core uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from penstock.core import ConfigError
from penstock.files import AUTO, REFERENCE
from penstock.messages import Sampling
from penstock.models.stage_model import load_stage
from penstock.stage.sampler import pick_tokens
from penstock.stage.visibility import BatchView, RequestView
from tests.checkpoints import ARCHITECTURES, LAYERS, VOCAB, make_checkpoint
from tests.staged import Staged, chain_rows

CAPACITY = 24
TOKENS = [17, 3, 99, 42, 8, 64, 120]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


def sequence_view(tokens: list[int]) -> BatchView:
    order = np.arange(len(tokens))
    request = RequestView(0, order, order, order, np.tril(np.ones((len(tokens), len(tokens)), dtype=bool)))
    return BatchView(order * 0, order + 100, order, order, np.array(tokens), [request], order - 1)


def test_facts_of_a_stage(folder: Path) -> None:
    first = load_stage(str(folder), 0, 2, capacity=CAPACITY)
    last = load_stage(str(folder), 2, LAYERS, capacity=CAPACITY)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert (first.hidden_size, first.vocab_size, first.dtype) == (32, VOCAB, "float32")
    whole = load_stage(str(folder), 0, LAYERS, capacity=CAPACITY)
    assert first.kv_bytes + last.kv_bytes == whole.kv_bytes
    # both ends hold a copy of the rotary frequencies
    assert 0 <= first.weight_bytes + last.weight_bytes - whole.weight_bytes < 100


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_a_stage_that_forgets_is_as_when_loaded(tmp_path: Path, architecture: str) -> None:
    """A request of the same number would otherwise go on with the old state."""
    stage = load_stage(str(make_checkpoint(tmp_path, architecture)), 0, LAYERS, capacity=CAPACITY)
    stage.tap([1, LAYERS])
    before = stage.features(stage.forward(sequence_view(TOKENS), None))
    stage.forget()
    assert not any(arena.any() for pair in stage._arenas._layers.values() for arena in pair)
    stage.forward(sequence_view(TOKENS[::-1]), None)
    assert stage._tapped == {}
    stage.forget()
    stage.tap([1])
    after = stage.features(stage.forward(sequence_view(TOKENS), None))
    torch.testing.assert_close(after, before[:, : after.shape[1]], rtol=0, atol=0)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slot_holds_the_keys_and_values_that_attention_reads(tmp_path: Path, architecture: str, dtype: str) -> None:
    path = make_checkpoint(tmp_path, architecture)
    keeps_latents = architecture == "deepseek_v3"  # test_latent.py; its plain path keeps keys and values
    stage = load_stage(str(path), 1, 4, capacity=CAPACITY, dtype=dtype, numerics=REFERENCE if keeps_latents else AUTO)
    read: list[int] = []

    def measured(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        read.append(key.nbytes + value.nbytes)
        alone = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)  # one token attends to itself only
        return alone.transpose(1, 2), None

    AttentionInterface.register("measured", measured)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="measured")
    whole(torch.tensor([[17]]))
    assert len(read) == LAYERS
    assert stage.kv_bytes == CAPACITY * sum(read[1:4])


def test_pick_is_greedy_over_the_wanted_rows(folder: Path) -> None:
    stage = load_stage(str(folder), 0, LAYERS, capacity=CAPACITY)
    view = sequence_view(TOKENS)
    hidden = stage.forward(view, None)
    picks = stage.pick(view, hidden, [2, 6], [Sampling(), Sampling()])
    assert [pick.node for pick in picks] == [102, 106]
    assert [pick.token for pick in picks] == stage.logits(hidden, [2, 6]).argmax(-1).tolist()


def test_candidates_are_ranked(folder: Path) -> None:
    stage = load_stage(str(folder), 0, LAYERS, capacity=CAPACITY)
    view = sequence_view(TOKENS)
    hidden = stage.forward(view, None)
    [answer] = stage.candidates(view, hidden, [6], [Sampling()], 3)
    assert answer.node == 106
    assert answer.tokens == stage.logits(hidden, [6])[0].topk(3).indices.tolist()


def test_sampling_noise_belongs_to_the_position_of_the_picked_token(folder: Path) -> None:
    stage = load_stage(str(folder), 0, LAYERS, capacity=CAPACITY)
    view, sampling = sequence_view(TOKENS), Sampling(seed=5, temperature=1.5)
    hidden = stage.forward(view, None)
    expected = pick_tokens(stage.logits(hidden, [6]), [sampling], [len(TOKENS)], [106])
    assert stage.pick(view, hidden, [6], [sampling]) == expected


def test_stage_without_layers_passes_hidden_states_on(folder: Path) -> None:
    stage = load_stage(str(folder), 2, 2, capacity=CAPACITY)
    hidden = torch.randn(7, 32)
    assert torch.equal(stage.forward(sequence_view(TOKENS), hidden), hidden)
    assert stage.kv_bytes == 0
    with pytest.raises(ConfigError, match="no head"):
        stage.logits(hidden, [0])


def test_ends_without_layers_embed_and_project(folder: Path) -> None:
    whole = load_stage(str(folder), 0, LAYERS, capacity=CAPACITY)
    stages = [load_stage(str(folder), *bounds, capacity=CAPACITY) for bounds in ((0, 0), (0, 5), (5, 5))]
    view, hidden = sequence_view(TOKENS), None
    for stage in stages:
        hidden = stage.forward(view, hidden)
    expected = whole.logits(whole.forward(view, None), [6])
    torch.testing.assert_close(stages[-1].logits(hidden, [6]), expected)


def test_rows_do_not_depend_on_the_size_of_the_batch(tmp_path: Path) -> None:
    """Wide enough to be packed; the same sequence row by row and all at once, on the fast and on the plain path."""
    path = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=2, initializer_range=0.1)
    results = []
    for plain in (False, True):
        at_once, one_by_one = (Staged(path, 1, numerics=REFERENCE if plain else AUTO) for _ in range(2))
        results.append(at_once.run(chain_rows(0, TOKENS, range(7)), range(7), opened=[0]))
        rows = chain_rows(0, TOKENS, range(7))
        for i in range(7):
            one = chain_rows(0, [TOKENS[i]], [i], i)
            one.parents[0] = rows.parents[i]
            logits = one_by_one.run(one, [0], opened=[0] if i == 0 else [])
            torch.testing.assert_close(logits[0], results[-1][i], atol=1e-4, rtol=0)
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_close_to_float32(folder: Path, dtype: str) -> None:
    full, half = Staged(folder, 2), Staged(folder, 2, dtype=dtype)
    rows = chain_rows(0, TOKENS, range(7))
    expected, logits = (staged.run(rows, range(7), opened=[0]) for staged in (full, half))
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


def test_arenas_are_zero_after_loading(folder: Path) -> None:
    stage = load_stage(str(folder), 0, 1, capacity=CAPACITY)
    with torch.inference_mode():
        keys, values = stage._arenas.store(0, torch.tensor([], dtype=torch.long), *[torch.zeros(2, 0, 8)] * 2)
    assert keys.shape == (2, CAPACITY, 8)
    assert not keys.any()
    assert not values.any()
