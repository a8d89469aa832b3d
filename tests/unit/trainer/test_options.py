"""Options that cannot work are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import FieldError
from penstock.trainer import kinds, options
from penstock.trainer.options import TrainOptions


def test_every_kind_has_its_recipe() -> None:
    assert tuple(kinds.KINDS) == options.KINDS


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "eagel3"}, "kind is 'eagel3'; did you mean 'eagle3'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"data": ()}, "data is ''; it has to be at least one file or folder"),
        ({"epochs": 0}, "epochs is 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"max_length": 4}, "max_length is 4; it has to be at least 8"),
        ({"kind": "medusa", "draft_vocab_size": 9}, "draft_vocab_size belongs to eagle3, not medusa"),
        ({"kind": "eagle", "ttt_steps": 2}, "ttt_steps belongs to eagle3, not eagle"),
        ({"accumulate": 5}, "batch_tokens is 8192; it has to be at least max_length x accumulate, 10240"),
        ({"output": Path(__file__)}, "output is .*; it has to be a folder"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_refused(wrong: dict[str, object], said: str) -> None:
    given = {"kind": "eagle3", "model": "demo", "data": (Path("x"),), "output": Path("nowhere"), **wrong}
    with pytest.raises(FieldError, match=said):
        TrainOptions(**given)
