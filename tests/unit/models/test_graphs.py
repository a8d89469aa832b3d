"""Steps that are recorded once and repeated give what steps that are computed anew give."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.strategies.families import ALL
from penstock.checkpoint.architectures import RECURRENT_TYPES, layer_types
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.drafters.merged import NgramDrafter
from penstock.engine.options import DEMO
from penstock.engine.resolve import DEMO_DRAFTERS
from penstock.files import FAST
from penstock.messages import Sampling
from penstock.models import graphs
from penstock.models.attention import EVERYTHING, Scoring, Segment, Span, _in_parts, flash_kernel, part_of
from penstock.models.graphs import FramePlan, Width, bucket, padded, width_of
from penstock.models.stage_model import load_stage
from penstock.requests.request import Request
from penstock.stage.visibility import BatchView, RequestView
from tests.checkpoints import RECURRENT, make_checkpoint
from tests.engines import InProcessEngine
from tests.exactness import PLAIN, PROMPTS, SAMPLED, TEXT, strategies, tokens_of
from tests.recorded import Tapes

CALM = 0.2
"""Standard deviation of the checkpoints' weights, so small that few tokens are nearly tied."""
TOKENS = 8
CPU = torch.device("cpu")
CAPACITY = 2048
SAMPLE = (
    *("llama", "mistral_window", "gemma3", "phi", "mixtral", "gpt_oss", "deepseek_v3"),
    *("llama4", "gemma3n", "gemma4_shared", "qwen3_next", "nemotron_h", "lfm2"),
)
"""A family for each way in which a layer meets a recorder: fused, windows, two widths of window, layers of
transformers' own, experts, sinks, latents, chunks, several states a row, shared keys and values; and three kinds of
state from row to row, which are not recorded."""


def families() -> list[Any]:
    """Every family; those whose layers are of a kind that the sample has run with the whole matrices."""
    return [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.whole]) for name in ALL]


def answers(target: Path, recorder: Tapes | None, which: int, **options: Any) -> list[Request]:
    engine = InProcessEngine(target, 2, NgramDrafter(4, 1), numerics=FAST, recorder=recorder, **options)
    requests = []
    for sampling in (Sampling(), SAMPLED):
        for prompt in (PROMPTS[0], TEXT):
            requests.append(engine.submit(list(prompt), sampling, TOKENS, strategies(2)[which]))
            engine.run()
    return requests


@pytest.mark.parametrize("name", families())
def test_every_familys_recorded_steps_give_the_tokens_of_the_others(name: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", name, initializer_range=CALM)
    expected = [tokens_of(one) for one in answers(target, None, PLAIN)]
    speculating = 1 + list(ALL).index(name) % (len(strategies(2)) - 1)
    tapes = Tapes()
    assert [tokens_of(one) for one in answers(target, tapes, speculating)] == expected
    has_state = not RECURRENT_TYPES.isdisjoint(layer_types(open_checkpoint(str(target)).config))
    assert (name in RECURRENT) == has_state
    assert (tapes.played > 0) != has_state, "layers with a state are planned by the host, and are not recorded"


@pytest.mark.parametrize("name", ["mistral_window", "gemma3", "llama4"])
def test_windows_whose_slots_are_given_back_are_recorded_over_both_kinds_of_arenas(name: str, tmp_path: Path) -> None:
    target, tapes = make_checkpoint(tmp_path / "target", name, initializer_range=CALM), Tapes()
    expected = [tokens_of(one) for one in answers(target, None, PLAIN, gives_back=True)]
    assert [tokens_of(one) for one in answers(target, tapes, PLAIN, gives_back=True)] == expected
    assert tapes.played


@pytest.mark.parametrize("drafter", ["eagle3", "spd"])
def test_a_learned_drafter_reads_the_same_features(drafter: str) -> None:
    found = []
    for recorder in (None, tapes := Tapes()):
        engine = InProcessEngine(
            DEMO / "target", 2, learned=DEMO_DRAFTERS / drafter, numerics=FAST, recorder=recorder, slots=1024
        )
        request = engine.submit([40 + i for i in range(12)], Sampling(), 24, strategies(2)[3])
        engine.run()
        found.append((tokens_of(request), request.metrics.accepted))
    assert found[0] == found[1]
    assert tapes.played


def test_several_requests_share_a_recorded_step(tmp_path: Path) -> None:
    target, tapes = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM), Tapes()
    found = []
    for recorder in (None, tapes):
        engine = InProcessEngine(target, 1, NgramDrafter(4, 1), numerics=FAST, recorder=recorder)
        prompts = [[5 + i, *TEXT[: 8 * i]] for i in range(6)]
        requests = [engine.submit(prompt, SAMPLED, TOKENS, strategies(1)[PLAIN]) for prompt in prompts]
        engine.run()
        found.append([tokens_of(request) for request in requests])
    assert found[0] == found[1]
    assert tapes.played


# --------------------------------------------------------------------------------------------------------------- frames


def batch(*requests: tuple[list[int], list[int]]) -> BatchView:
    """Requests as (slots of a chain from its first token on, how many of its last are the batch's rows)."""
    views, slots, positions, first = [], [], [], 0
    for number, (chain, (rows,)) in enumerate(requests):
        length, seen = len(chain), np.arange(len(chain))
        own = np.arange(length - rows, length)
        mask = seen[None] <= own[:, None]
        views.append(RequestView(number, np.arange(first, first + rows), np.array(chain), seen, mask))
        slots += [chain[i] for i in own]
        positions += own.tolist()
        first += rows
    numbers = np.arange(first)
    return BatchView(numbers, numbers, np.array(slots), np.array(positions), numbers % 7, views, numbers - 1)


def test_powers_of_two() -> None:
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    assert padded(np.array([4, 9]), 4).tolist() == [4, 9, 9, 9]


@pytest.mark.parametrize(
    ("slots", "capacity", "width"),
    [
        (range(3), 2048, Width(256, False)),
        (range(300), 2048, Width(512, False)),
        (range(300), 400, Width(400, False)),
        (range(1500, 1503), 2048, Width(256, True)),
        (range(0, 600, 2), 2048, Width(1024, False)),
        (range(0, 2000, 8), 2048, Width(256, True)),
    ],
)
def test_slots_far_apart_are_gathered(slots: range, capacity: int, width: Width) -> None:
    assert width_of(batch((list(slots), [1])), capacity) == width


@pytest.mark.parametrize("chains", [[(5, 3)], [(5, 1), (9, 4)]], ids=["one request", "two"])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("span", [EVERYTHING, Span(window=3), Span(chunk=4)])
def test_a_frames_rows_see_what_the_batchs_rows_see(chains: list[tuple[int, int]], gathered: bool, span: Span) -> None:
    rng = np.random.default_rng(0)
    free = rng.permutation(60)
    requests = []
    for length, rows in chains:
        requests.append((free[:length].tolist(), [rows]))
        free = free[length:]
    view = batch(*requests)
    plan = FramePlan(8, Width(64, gathered), 64, CPU)
    plan.fill(view)
    plan.begin()
    (segment,) = plan.segments(span)
    columns = np.arange(64) if isinstance(segment.columns, slice) else segment.columns.numpy()
    seen = [set(columns[row.numpy()].tolist()) for row in segment.mask_nS]
    expected: dict[int, set[int]] = {}
    for request in view.views:
        for row, mask in zip(request.rows, span.of(view, request, slice(None)), strict=True):
            expected[int(row)] = set(request.slots[mask].tolist())
    assert seen == [expected[min(row, len(view) - 1)] for row in range(8)]
    assert plan.slots_N.tolist() == padded(view.slots, 8).tolist()
    assert plan.positions_N.tolist() == padded(view.positions, 8).tolist()


@pytest.mark.parametrize("first", [0, 1], ids=["the first stage", "a later one"])
@pytest.mark.parametrize("lowest", [0, 1500], ids=["near", "gathered"])
def test_states_of_recorded_rows_are_those_of_others(first: int, lowest: int, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM)
    stage, recorded = (load_stage(str(target), first, 4, capacity=CAPACITY, numerics=FAST) for _ in range(2))
    tapes = Tapes()
    recorded.record_steps(tapes)
    for one in (stage, recorded):
        one.tap([2, 3])
    torch.manual_seed(0)
    for length in range(1, 12):
        view = batch((list(range(lowest, lowest + length)), [1 + (length - 1) % 3]))
        hidden = None if first == 0 else torch.randn(len(view), stage.hidden_size)
        expected, found = stage.forward(view, hidden), recorded.forward(view, hidden)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(recorded.features(found), stage.features(expected), atol=1e-5, rtol=1e-5)
    assert tapes.recorded == 3  # of 1, 2 and 4 rows
    assert tapes.played == 11 - 3
    kept = found.clone()
    recorded.forward(view, hidden)
    assert torch.equal(found, kept), "a result stays what it is when the step is repeated"


def test_other_tapped_layers_are_recorded_anew(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM)
    stage, tapes = load_stage(str(target), 0, 4, capacity=CAPACITY, numerics=FAST), Tapes()
    stage.record_steps(tapes)
    for taps in ([1], [1], [3]):
        stage.tap(taps)
        for length in range(1, 5):
            view = batch((list(range(length)), [1]))
            assert stage.features(stage.forward(view, None)).shape == (1, stage.hidden_size)
    assert tapes.recorded == 2


class Broken:
    """A recorder of a device that cannot record."""

    def __init__(self, error: Exception) -> None:
        self.asked = 0
        self._error = error

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        self.asked += 1
        run()
        raise self._error


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("no room")])
def test_a_step_that_cannot_be_recorded_is_computed_as_before(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, broken = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM), Broken(error)
    expected = [tokens_of(one) for one in answers(target, None, PLAIN)]
    with caplog.at_level(logging.WARNING):
        assert [tokens_of(one) for one in answers(target, broken, PLAIN)] == expected  # type: ignore[arg-type]
    assert broken.asked == 2, "once a stage"
    assert sum("without CUDA graphs" in record.message for record in caplog.records) == 2


def test_a_step_that_reads_the_host_is_not_recorded(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM)
    stage, tapes = load_stage(str(target), 0, 4, capacity=CAPACITY, numerics=FAST), Tapes()
    stage.record_steps(tapes)
    layer = stage._base.layers[0]
    layer.register_forward_pre_hook(lambda *_: torch.ones(1).sum().item() and None)
    for length in range(1, 5):
        stage.forward(batch((list(range(length)), [1])), None)
    assert (tapes.recorded, tapes.played) == (0, 0)


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_prompts_are_not_recorded(rows: int, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM)
    stage, tapes = load_stage(str(target), 0, 4, capacity=CAPACITY, numerics=FAST), Tapes()
    stage.record_steps(tapes)
    for _ in range(3):
        stage.forward(batch((list(range(rows)), [rows])), None)
    assert tapes.played == (2 if rows <= graphs.MOST_ROWS else 0)


@pytest.mark.parametrize("options", [{"numerics": "exact"}, {"quantization": "int4"}, {"numerics": "reference"}])
def test_steps_of_compiled_layers_are_not_recorded(options: dict[str, str], tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM)
    stage = load_stage(str(target), 0, 4, capacity=CAPACITY, **options)
    stage.record_steps(Tapes())
    assert stage._graphs is None


# --------------------------------------------------------------------------------------------------- attention in parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slots", [1024, 5000, 8192])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("reach", [1.0, 0.1])
def test_parts_of_the_slots_together_give_what_they_give_at_once(
    dtype: torch.dtype, slots: int, groups: int, reach: float
) -> None:
    torch.manual_seed(slots)
    heads, rows, width = 2, 5, 16
    query = torch.randn(heads * groups, rows, width).to(dtype)
    keys, values = torch.randn(2, heads, slots, width).to(dtype)
    mask = torch.rand(rows, slots) < 0.5
    mask[:, int(reach * slots) :] = False  # some parts are seen by no row
    mask[:, 0] = True
    segment, scale = Segment(slice(0, rows), slice(0, slots), mask), 0.25
    part = part_of(slots)
    found = _in_parts(query.view(heads, groups * rows, width), keys, values, segment, scale, part)
    exact = query.view(heads, groups * rows, width).double() @ keys.double().transpose(1, 2) * scale
    exact = exact.masked_fill(~mask.repeat(groups, 1), -torch.inf).softmax(dim=-1) @ values.double()
    whole = flash_kernel(query, keys, values, segment, Scoring(scale)).view_as(exact).double()
    error, usual = ((one - exact).norm() for one in (found.double(), whole))
    assert error < 1.5 * usual, "each part's output is rounded once more"


@given(st.integers(1, 200_000))
def test_parts_are_alike(slots: int) -> None:
    if part := part_of(slots):
        assert slots % part == 0
        assert part % 8 == 0
        assert 64 < part <= 512
        assert slots >= 1024
    else:
        assert slots < 1024 or all(slots % size for size in range(128, 257, 8) if slots <= 4096)


# ------------------------------------------------------------------------------------------------------- the start


@pytest.mark.parametrize("first", [0, 1], ids=["the first stage", "a later one"])
@pytest.mark.parametrize("capacity", [100, 300, CAPACITY])
def test_a_stage_that_is_prepared_records_nothing_in_a_short_text(first: int, capacity: int, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM)
    stage, other = (load_stage(str(target), first, 4, capacity=capacity, numerics=FAST) for _ in range(2))
    tapes = Tapes()
    stage.record_steps(tapes)
    stage.tap([2])
    other.tap([2])
    stage.prepare()
    usual = {100: 0, 300: 7, CAPACITY: 21}[capacity]
    assert tapes.recorded == usual, "rows of 1 to 64, behind as many slots as there are"
    before = tapes.played
    torch.manual_seed(0)
    for length in range(1, 90, 11):
        view = batch((list(range(length)), [min(length, 8)]))
        hidden = None if first == 0 else torch.randn(len(view), stage.hidden_size)
        torch.testing.assert_close(stage.forward(view, hidden), other.forward(view, hidden), atol=1e-5, rtol=1e-5)
    if usual:
        assert (tapes.recorded, tapes.played) == (usual, before + 9)
    stage.forget()  # as for the next session, after a loss
    stage.tap([2])
    before = tapes.recorded, tapes.played
    stage.prepare()
    assert (tapes.recorded, tapes.played) == before, "graphs outlast a session"


def test_a_prepared_stage_holds_nothing(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", initializer_range=CALM)
    stage = load_stage(str(target), 0, 4, capacity=CAPACITY, numerics=FAST)
    stage.record_steps(Tapes())
    stage.prepare()
    for keys, values in stage._arenas._layers.values():
        assert not keys.any()
        assert not values.any()
