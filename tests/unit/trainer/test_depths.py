"""Which level a token is seen at follows from the stages that it has passed, and from how full the pipeline is."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.models.checkpoint import open_checkpoint
from penstock.trainer.depths import Block, anchored, lay_out, layers_done
from tests.checkpoints import make_checkpoint

LEVELS = (0, 1, 1, 2, 2)


def test_the_last_stage_gives_the_normed_states_even_without_a_layer(tmp_path: Path) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "even", num_hidden_layers=8)))
    assert layers_done(target, 4) == (0, 2, 4, 6, 8)
    target = open_checkpoint(str(make_checkpoint(tmp_path / "head", num_hidden_layers=2, vocab_size=9000)))
    assert target.even_split(2) == [(0, 1), (1, 2)]
    assert layers_done(target, 2) == (0, 1, 2)
    assert target.even_split(4)[-1] == (2, 2)
    assert layers_done(target, 4)[-2:] == (1, 2)


def test_a_level_is_the_deepest_anchor_that_has_been_passed() -> None:
    assert anchored((0, 1, 4, 8), (0, 2, 4, 6, 8)) == (0, 1, 2, 2, 3)
    assert anchored((0, 1, 2), (0, 2, 4, 6, 8)) == (0, 2, 2, 2, 2)
    assert anchored((3,), (0, 2, 4, 8)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("levels", "fill", "expected"),
    [
        (LEVELS, 4, [Block(0, 0, (0, 1, 1)), Block(1, 1, (1, 1)), Block(2, 3, ())]),
        (LEVELS, 2, [Block(0, 0, (0, 1)), Block(1, 1, (1,)), Block(2, 2, ())]),
        (LEVELS, 1, [Block(0, 0, (0,)), Block(2, 1, ())]),
        ((0, 2, 3), 2, [Block(0, 0, (0, 2)), Block(2, 1, (2,)), Block(3, 2, ())]),
        ((0, 0), 1, [Block(0, 0, ())]),
    ],
)
def test_a_row_sees_its_neighbours_as_deep_as_they_are_by_then(
    levels: tuple[int, ...], fill: int, expected: list[Block]
) -> None:
    assert list(lay_out(levels, fill)) == expected


def test_of_the_papers_only_the_newest_are_asked() -> None:
    assert list(lay_out((0, 1, 2, 3), 3, only=True)) == [
        Block(0, 0, (0, 1, 2)),
        Block(1, 1, None),
        Block(2, 2, None),
        Block(3, 3, None),
    ]
    after_a_stage = lay_out((0, 1, 2, 3), 1, asked=1, only=True)
    assert list(after_a_stage) == [Block(1, 1, (1,)), Block(3, 2, None)]
