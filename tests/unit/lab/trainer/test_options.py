"""Options that cannot work are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import FieldError
from penstock.lab.trainer import options
from penstock.lab.trainer import run as kinds
from penstock.lab.trainer.options import TrainOptions, whole_numbers


def test_every_kind_has_its_recipe() -> None:
    assert tuple(kinds.KINDS) == options.KINDS


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "eagel3"}, "kind is 'eagel3'; did you mean 'eagle3'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"data": ()}, "data is ''; it has to be at least one file or folder, or give self_generate"),
        ({"self_generate": 9}, "data cannot go with self_generate, which writes both sides; remove one of them"),
        ({"data": (), "self_generate": 9, "regenerate": True}, "regenerate cannot go with self_generate"),
        ({"data": (), "self_generate": 0}, "self_generate is 0"),
        ({"temperatures": (1.0,)}, "temperatures belongs to self_generate and regenerate; remove it, or"),
        (
            {"temperatures": (0.5, -1.0), "regenerate": True},
            r"temperatures is \(0.5, -1.0\); it has to be numbers of 0",
        ),
        ({"temperatures": (float("nan"),), "regenerate": True}, r"temperatures is \(nan,\); it has to be numbers of 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"max_length": 4}, "max_length is 4; it has to be at least 8"),
        (
            {"kind": "eagle", "draft_vocab_size": 9},
            "draft_vocab_size belongs to eagle3, medusa, spd, early-exit, peagle, not",
        ),
        ({"kind": "eagle", "heads": 2}, "heads belongs to medusa, not eagle; remove it"),
        (
            {"kind": "draft", "spec_layers": 2},
            "spec_layers belongs to spd, early-exit, dflash, dspark, headrace, peagle, not draft",
        ),
        ({"kind": "spd", "layers": 2}, "layers belongs to draft, not spd"),
        ({"kind": "early-exit", "anchors": (0, 2)}, "anchors belongs to spd, not early-exit"),
        ({"kind": "spd", "exit_layer": 2}, "exit_layer belongs to early-exit, not spd"),
        ({"kind": "early-exit", "exit_layer": 0}, "exit_layer is 0"),
        ({"kind": "spd", "variant": "papers"}, "variant is 'papers'; did you mean 'paper'"),
        ({"kind": "spd", "variant": "paper"}, "stages is missing; variant paper is trained for one number of stages"),
        (
            {"kind": "spd", "variant": "paper", "stages": (4, 8)},
            r"stages is \(4, 8\); variant paper is trained for one",
        ),
        ({"kind": "spd", "variant": "paper", "stages": (4,), "anchors": (0, 2)}, "anchors belongs to variant anchors"),
        ({"kind": "spd", "post_state": True}, "post_state belongs to variant paper, not anchors"),
        ({"kind": "spd", "stages": (8, 4)}, r"stages is \(8, 4\); it has to be a rising list"),
        ({"kind": "spd", "stages": (0, 4)}, r"stages is \(0, 4\); it has to be numbers above 0"),
        ({"kind": "spd", "anchors": (1, 4)}, r"anchors is \(1, 4\); it has to be 0, what a token has that"),
        ({"kind": "spd", "anchors": (0,)}, r"anchors is \(0,\); it has to be 0, what .* and at least one more"),
        ({"kind": "dflash", "markov_rank": 8}, "markov_rank belongs to dspark, headrace, not dflash"),
        ({"kind": "dspark", "block_size": 1}, "block_size is 1; it has to be at least 2"),
        ({"kind": "dspark", "in_flight": -1}, "in_flight is -1; it has to be 0 or above"),
        ({"kind": "spd", "bidirectional": True}, "bidirectional belongs to dflash, dspark, not spd"),
        ({"kind": "eagle", "ttt_steps": 2}, "ttt_steps belongs to eagle3, mtp, not eagle"),
        ({"accumulate": 5}, "batch_tokens is 8192; it has to be at least max_length x accumulate, 10240"),
        ({"output": Path(__file__)}, "output is .*; it has to be a folder"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_refused(wrong: dict[str, object], said: str) -> None:
    given = {"kind": "eagle3", "model": "demo", "data": (Path("x"),), "output": Path("nowhere"), **wrong}
    with pytest.raises(FieldError, match=said):
        TrainOptions(**given)


def test_a_list_of_whole_numbers_is_read_or_refused() -> None:
    assert whole_numbers("stages", "4,8, 16") == (4, 8, 16)
    with pytest.raises(FieldError, match="stages is '4;8'; it has to be a list of whole numbers, like 4,8,16"):
        whole_numbers("stages", "4;8")
