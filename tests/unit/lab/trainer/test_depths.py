"""At which levels tokens are seen follows from how full the pipeline is."""

from __future__ import annotations

import pytest

from penstock.lab.trainer.spd import Block, lay_out

LEVELS = (0, 1, 1, 2, 2)


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
