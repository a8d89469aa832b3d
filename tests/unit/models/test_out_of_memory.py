"""A batch that a device's memory does not suffice for is computed in halves, and gives what it would have given."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import FieldError
from penstock.messages import Sampling
from penstock.models import packing
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.visibility import BatchView, RequestView, part_of
from tests.checkpoints import LAYERS, make_checkpoint
from tests.fake_gpu import batches
from tests.scarce_memory import limited

CAPACITY = 128
CPU = torch.device("cpu")
SAMPLING = Sampling(temperature=1.0, seed=3)


def limit(stage: StageModel, rows: int, folder: Path) -> Path:
    """Let a stage fail for more rows; the file that tells of it."""
    failures = folder / "failures"
    stage._run = partial(limited, stage, most=rows, failures=failures)  # type: ignore[method-assign]
    return failures


def computed(stage: StageModel) -> list[tuple[Any, ...]]:
    """States, features and picks of the batches of ``tests.fake_gpu``."""
    found = []
    for view in batches():
        hidden = stage.forward(view, None)
        wanted = list(range(0, len(view), 3))
        picks = stage.pick(view, hidden, wanted, [SAMPLING] * len(wanted))
        found.append((hidden, stage.features(hidden) if stage._taps else hidden, picks))
    return found


@pytest.mark.parametrize("gives_back", [False, True], ids=["keeps", "gives_back"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "deepseek_v3", "qwen3_next", "nemotron_h", "llama4"])
def test_halves_give_the_same(tmp_path: Path, architecture: str, gives_back: bool) -> None:
    target = str(make_checkpoint(tmp_path / "model", architecture, initializer_range=0.2))
    whole, scarce = (
        load_stage(target, 0, LAYERS, capacity=CAPACITY, numerics="fast", max_model_len=CAPACITY, gives_back=gives_back)
        for _ in range(2)
    )
    failures = limit(scarce, 3, tmp_path)
    for stage in (whole, scarce):
        stage.tap([1, LAYERS])
    for (states, features, picks), (hidden, found, picked) in zip(computed(whole), computed(scarce), strict=True):
        torch.testing.assert_close(hidden, states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-4)
        assert picked == picks
    # 70 rows, 35, 18 and 17, 9 and 8, 5 and 4: three or two fit.
    assert failures.read_text().split("\n")[:4] == ["70 rows", "35 rows", "17 rows", "8 rows"]


def test_halves_of_an_exact_stage_give_the_same_bits(tmp_path: Path) -> None:
    target = str(make_checkpoint(tmp_path / "model", "llama"))
    whole, scarce = (load_stage(target, 0, LAYERS, capacity=CAPACITY, numerics="exact") for _ in range(2))
    failures = limit(scarce, 5, tmp_path)
    for (states, _, picks), (hidden, _, picked) in zip(computed(whole), computed(scarce), strict=True):
        assert torch.equal(hidden, states)
        assert picked == picks
    assert failures.exists()


def test_a_later_stage_halves_what_enters_it(tmp_path: Path) -> None:
    target = str(make_checkpoint(tmp_path / "model", "gemma4_shared"))
    first, whole, scarce = (
        load_stage(target, *layers, capacity=CAPACITY, max_model_len=CAPACITY) for layers in ((0, 4), (4, 7), (4, 7))
    )
    limit(scarce, 2, tmp_path)
    for view in batches():
        entering = first.forward(view, None)
        torch.testing.assert_close(scarce.forward(view, entering), whole.forward(view, entering), rtol=1e-4, atol=1e-4)


def test_the_head_is_halved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = load_stage(str(make_checkpoint(tmp_path / "model")), 0, LAYERS, capacity=CAPACITY)
    view = batches()[1]
    hidden, wanted, samplings = stage.forward(view, None), list(range(8)), [SAMPLING] * 8
    picks = stage.pick(view, hidden, wanted, samplings)
    ranked = stage.candidates(view, hidden, wanted, samplings, 4)
    logits, asked = stage.logits, []

    def scarcely(hidden: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        asked.append(len(wanted))
        if len(wanted) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits(hidden, wanted)

    monkeypatch.setattr(stage, "logits", scarcely)
    assert stage.pick(view, hidden, wanted, samplings) == picks
    assert stage.candidates(view, hidden, wanted, samplings, 4) == ranked
    assert asked == [8, 4, 2, 2, 4, 2, 2] * 2


def test_one_row_that_does_not_fit_is_told_in_a_line(tmp_path: Path) -> None:
    stage = load_stage(str(make_checkpoint(tmp_path / "model")), 0, LAYERS, capacity=CAPACITY)
    limit(stage, 0, tmp_path)
    with pytest.raises(FieldError, match="device is 'cpu', whose memory does not suffice for a batch of one") as told:
        stage.forward(batches()[0], None)
    assert "\n" not in str(told.value)
    assert "use fewer kv_slots" in str(told.value)


def test_weights_that_do_not_fit_are_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    monkeypatch.setattr("penstock.models.stage_model.move", full)
    with pytest.raises(
        FieldError, match=r"device is 'meta', whose memory does not suffice for layers 1 to 3: use"
    ) as told:
        load_stage(str(make_checkpoint(tmp_path)), 1, 3, capacity=CAPACITY, device="meta")
    assert "\n" not in str(told.value)


def test_memory_is_given_back_before_the_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch keeps of the failed attempt would be in the way, and so would its traceback."""
    events: list[Any] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))

    def compute(rows: slice) -> int:
        events.append((rows.start, rows.stop))
        if rows.stop - rows.start > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return rows.start

    assert packing.in_halves(compute, slice(0, 5), torch.device("cuda:0")) == [0, 2, 3]
    assert events == [(0, 5), "empty", (0, 2), (2, 5), "empty", (2, 3), (3, 5)]


def test_a_part_of_a_batch() -> None:
    """Rows of the second request lie on both sides of the cut; slot 9 is seen by the first half alone."""
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]], dtype=bool)
    one = RequestView(7, np.array([0]), np.array([3]), np.array([0]), np.ones((1, 1), dtype=bool))
    two = RequestView(8, np.array([1, 2, 3]), np.array([5, 6, 9, 4, 8]), np.array([0, 1, 2, 2, 3]), mask, committed=2)
    rows = np.arange(4)
    view = BatchView(np.array([7, 8, 8, 8]), rows + 10, np.array([3, 9, 4, 8]), rows, rows + 20, [one, two], rows - 1)
    first, second = part_of(view, slice(0, 2)), part_of(view, slice(2, 4))
    assert [seen.request for seen in first.views] == [7, 8]
    (behind,) = second.views
    assert behind.rows.tolist() == [0, 1]
    assert behind.slots.tolist() == [5, 6, 4, 8]
    assert behind.positions.tolist() == [0, 1, 2, 3]
    assert behind.mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert behind.committed == 2
    assert (second.nodes.tolist(), second.tokens.tolist()) == ([12, 13], [22, 23])
