"""Every architecture, split into stages, says what transformers says: greedy texts, and whole trees in one batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.files import REFERENCE
from penstock.messages import CommittedSlots, Rows
from tests.checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from tests.generated import generate
from tests.staged import Staged, chain_rows

PROMPT = [17, 3, 99, 42, 8, 64, 120]
OTHER_PROMPT = [5, 77, 31, 9, 140, 66, 12, 90, 33]
TREE_PARENTS = [None, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 13]
TOLERANCE = 1e-4
CAPACITY = 160


DRAWN = random.Random(1)
SLOTS = DRAWN.sample(range(40), 40)
PATHS: list[list[int]] = []
"""The tokens of each node of the tree, from the prompt's first on."""
for parent in TREE_PARENTS:
    PATHS.append([*(PROMPT if parent is None else PATHS[parent]), DRAWN.randrange(VOCAB)])


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(folder, request.param, seed=2, max_shard_size="40KB")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(reference: torch.nn.Module) -> list[Tensor]:
    return tree_logits(reference)


@pytest.fixture(scope="module")
def text(reference: torch.nn.Module) -> list[int]:
    return generate(reference, PROMPT, 24)


@pytest.fixture(scope="module")
def fast(checkpoint: Path) -> Staged:
    return Staged(checkpoint, 3, capacity=CAPACITY)


@pytest.mark.parametrize("stages", [1, 3, pytest.param(5, marks=pytest.mark.whole)])
def test_greedy_text_is_that_of_generate(checkpoint: Path, fast: Staged, text: list[int], stages: int) -> None:
    assert len(set(text)) > 8, "a text that repeats itself would hide mistakes"
    staged = fast.begin() if stages == 3 else Staged(checkpoint, stages)
    assert staged.greedy(PROMPT, 24) == text


@pytest.mark.parametrize(
    ("plain", "spread"),
    [
        pytest.param(False, 4, id="fast, scattered slots"),
        pytest.param(True, 1, id="plain, dense slots"),
        pytest.param(False, 1, id="fast, dense slots", marks=pytest.mark.whole),
        pytest.param(True, 4, id="plain, scattered slots", marks=pytest.mark.whole),
    ],
)
def test_tree_rows_equal_separate_sequences(checkpoint: Path, fast: Staged, expected, plain: bool, spread: int) -> None:
    check_tree(plain_stages(checkpoint) if plain else fast.begin(), expected, spread)


def plain_stages(checkpoint: Path) -> Staged:
    return Staged(checkpoint, 3, capacity=CAPACITY, numerics=REFERENCE)


def check_tree(staged: Staged, expected: Sequence[Tensor], spread: int) -> None:
    """A 15-node tree and the second request's prompt in one batch, in shuffled slots shared by nobody.

    ``expected`` is what ``tree_logits`` gives for the checkpoint, of which ``staged`` has ``CAPACITY`` slots.
    """
    slots = [spread * slot for slot in SLOTS]
    prompt_slots, tree_slots = slots[: len(PROMPT)], slots[7:22]
    staged.run(chain_rows(0, PROMPT, prompt_slots), [len(PROMPT) - 1], opened=[0])

    rows = Rows()
    for i, (parent, path) in enumerate(zip(TREE_PARENTS, PATHS, strict=True)):
        above = prompt_slots[-1] if parent is None else tree_slots[parent]
        rows.append(0, i, tree_slots[i], above, len(path) - 1, path[-1])
    other = chain_rows(1, OTHER_PROMPT, slots[22:31])
    for column in ("requests", "nodes", "slots", "parents", "positions", "tokens"):
        getattr(rows, column).extend(getattr(other, column))
    logits = staged.run(rows, [*range(15), 23], opened=[1], committed=[CommittedSlots(0, prompt_slots)])

    for row, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(row, wanted, atol=TOLERANCE, rtol=0)


def tree_logits(reference: torch.nn.Module) -> list[Tensor]:
    """The reference's logits [V] behind each of ``PATHS`` and behind ``OTHER_PROMPT``.

    There is a pass of its own for every path that no other continues; what it says on the way is that of the others.
    """
    found: dict[tuple[int, ...], Tensor] = {}
    wanted = [tuple(path) for path in (*PATHS, OTHER_PROMPT)]
    for path in sorted(wanted, key=len, reverse=True):
        if path not in found:
            with torch.inference_mode():
                logits = reference(torch.tensor([path])).logits[0]
            found |= {path[:end]: logits[end - 1] for end in range(1, len(path) + 1)}
    return [found[path] for path in wanted]
