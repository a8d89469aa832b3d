"""How far a token has got, and the level at which SPD's module sees it, follow from the stages that it has passed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.drafters.spd import layers_done, levels_after
from tests.checkpoints import make_checkpoint


def stages(*bounds: int) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


def anchored(*anchors: int) -> list[tuple[int, ...]]:
    """Level i reads the states at the first i + 1 anchors."""
    return [anchors[: i + 1] for i in range(len(anchors))]


def test_the_last_stage_gives_the_normed_states_even_without_a_layer(tmp_path: Path) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "even", num_hidden_layers=8)))
    assert layers_done(target.even_split(4)) == (0, 2, 4, 6, 8)
    target = open_checkpoint(str(make_checkpoint(tmp_path / "head", num_hidden_layers=2, vocab_size=9000)))
    assert target.even_split(2) == [(0, 1), (1, 2)]
    assert layers_done(target.even_split(2)) == (0, 1, 2)
    assert target.even_split(4)[-1] == (2, 2)
    assert layers_done(target.even_split(4))[-2:] == (1, 2)


def test_a_level_is_the_deepest_whose_states_are_there() -> None:
    assert levels_after(stages(0, 2, 4, 6, 8), anchored(0, 1, 4, 8)) == (0, 1, 2, 2, 3)
    assert levels_after(stages(0, 2, 4, 6, 8), anchored(0, 1, 2)) == (0, 2, 2, 2, 2)
    assert levels_after(stages(0, 2, 4, 8), anchored(3)) == (0, 0, 0, 0)
    assert levels_after(stages(0, 5, 6, 8), anchored(0, 1, 4, 8)) == (0, 2, 2, 3), "stages need not be even"


def test_the_last_states_are_there_after_the_last_stage_with_their_norm_or_before_it() -> None:
    for last in (8, 9):
        assert levels_after(stages(0, 4, 8), anchored(0, 4, last)) == (0, 1, 2)
        assert levels_after(stages(0, 4, 8, 8), anchored(0, 7, last)) == (0, 0, 1, 2), "the norm is the last stage's"
