"""The draft vocabulary is what is most often to be drafted."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.lab.trainer.corpus import Corpus, Sample
from penstock.lab.trainer.data import choose


def sample(document: int, *tokens: int, silent: int | None = None) -> Sample:
    tokens_L = np.array([0, 0, *tokens])
    return Sample(document, tokens_L, tokens_L != silent)


CORPUS = Corpus([sample(0, 7, 7, 3, 3, 9, 5, 5, 5, silent=5), sample(1, 7, 9, 9, 9)], [0], [1])


def test_it_counts_what_is_to_be_learned_on_the_training_side() -> None:
    found = choose(CORPUS, 2, 10)
    assert found.ids_v is not None
    assert found.ids_v.tolist() == [3, 7]
    assert (found.training_share, found.held_out_share) == (pytest.approx(4 / 5), pytest.approx(1 / 4))


def test_of_equally_frequent_tokens_the_lower_comes_first() -> None:
    found = choose(CORPUS, 5, 10)
    assert found.ids_v is not None
    assert found.ids_v.tolist() == [0, 1, 3, 7, 9]


def test_a_target_of_few_tokens_keeps_them_all() -> None:
    found = choose(CORPUS, 32000, 10)
    assert (found.ids_v, found.size, found.training_share) == (None, 10, 1.0)
