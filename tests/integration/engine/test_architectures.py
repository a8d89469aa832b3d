"""Every architecture, split into stages, says what transformers says: greedy texts, and whole trees in one batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.files import AUTO, REFERENCE
from penstock.messages import CommittedSlots, Rows
from tests.checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from tests.generated import generate
from tests.staged import Staged, chain_rows

PROMPT = [17, 3, 99, 42, 8, 64, 120]
OTHER_PROMPT = [5, 77, 31, 9, 140, 66, 12, 90, 33]
TREE_PARENTS = [None, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 13]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(folder, request.param, seed=2, max_shard_size="40KB")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.mark.parametrize("stages", [1, pytest.param(3, marks=pytest.mark.whole), 5])
def test_greedy_text_is_that_of_generate(checkpoint: Path, reference, stages: int) -> None:
    expected = generate(reference, PROMPT, 24)
    assert len(set(expected)) > 8, "a text that repeats itself would hide mistakes"
    assert Staged(checkpoint, stages).greedy(PROMPT, 24) == expected


@pytest.mark.parametrize(
    ("plain", "spread"),
    [
        pytest.param(False, 4, id="fast, scattered slots"),
        pytest.param(True, 1, id="plain, dense slots"),
        pytest.param(False, 1, id="fast, dense slots", marks=pytest.mark.whole),
        pytest.param(True, 4, id="plain, scattered slots", marks=pytest.mark.whole),
    ],
)
def test_tree_rows_equal_separate_sequences(checkpoint: Path, reference, plain: bool, spread: int) -> None:
    check_tree(checkpoint, reference, plain, spread)


def check_tree(checkpoint: Path, reference: torch.nn.Module, plain: bool, spread: int) -> None:
    """A 15-node tree and the second request's prompt in one batch, in shuffled slots shared by nobody."""
    rng = random.Random(1)
    slots = [spread * slot for slot in rng.sample(range(40), 40)]
    staged = Staged(checkpoint, 3, capacity=160, numerics=REFERENCE if plain else AUTO)
    prompt_slots = slots[: len(PROMPT)]
    staged.run(chain_rows(0, PROMPT, prompt_slots), [len(PROMPT) - 1], opened=[0])

    rows, tree_tokens = Rows(), [rng.randrange(VOCAB) for _ in TREE_PARENTS]
    tree_slots, paths = slots[7:22], []
    for i, parent in enumerate(TREE_PARENTS):
        above = prompt_slots[-1] if parent is None else tree_slots[parent]
        paths.append([*(PROMPT if parent is None else paths[parent]), tree_tokens[i]])
        rows.append(0, i, tree_slots[i], above, len(paths[i]) - 1, tree_tokens[i])
    other = chain_rows(1, OTHER_PROMPT, slots[22:31])
    for column in ("requests", "nodes", "slots", "parents", "positions", "tokens"):
        getattr(rows, column).extend(getattr(other, column))
    logits = staged.run(rows, [*range(15), 23], opened=[1], committed=[CommittedSlots(0, prompt_slots)])

    for path, row in zip([*paths, OTHER_PROMPT], logits, strict=True):
        expected = reference(torch.tensor([path])).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)
