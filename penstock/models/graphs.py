"""Steps of few rows as CUDA graphs: one launch in place of the hundreds of kernels that a step takes.

A GPU computes a layer of one row sooner than Python and the driver launch its kernels, one by one. A graph holds the
kernels with their shapes and addresses, so that batches have to fit a frame: rows N are padded to B, slots to S, both
powers of two, and a mask says what each row sees.

    N = 3 rows, B = 4:    row 0   row 1   row 2   row 2 again

The padding repeats the last row, which stores the same keys and values once more; nobody reads its output. A frame's
graph is recorded when a second batch needs it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.models.attention import Segment, Span
from penstock.stage.visibility import BatchView

logger = logging.getLogger(__name__)

MOST_ROWS: Final = 64
"""Most rows of a batch that a graph serves: with more, as in a prompt, arithmetic takes longer than the launches."""
LEAST_SLOTS: Final = 256
"""Fewest slots of a frame; smaller ones would be more graphs to record, for little."""
MOST_CELLS: Final = 1 << 21
"""Rows times slots of the largest mask, one byte each: it goes to the device with every batch. That is ``MOST_ROWS``
rows over 32,768 slots."""
SCATTERED: Final = 2
"""A batch's slots are gathered if those up to the highest are more than this multiple of the slots that it sees.
Gathering copies the slots that are seen; reading in place also reads those that are not."""
USUAL_SLOTS: Final = 1024
"""Slots up to which all frames are recorded as a stage starts, in some three seconds: most texts grow no longer."""
MET_BEFORE: Final = 1
"""Batches of a frame that are computed without a graph before it is recorded: many frames are met only once."""


class Recorder(Protocol):
    """Records what a function does on a device."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Run the function; returns what repeats it, over the same tensors, and its result, which is written anew."""
        ...


class CudaGraphs:
    """CUDA graphs of one device that share their memory: a result lasts until the next graph is run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """See ``Recorder``. Raises RuntimeError where the function waits for the device or reads the host."""
        with torch.cuda.device(self._device):
            # torch wants the run before a capture on another stream than the current one; each waits for the other.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries take memory and choose kernels when they are first used
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads do with the device meanwhile cannot fail the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        return graph.replay, result


class Width(NamedTuple):
    """The slots of a frame: the first ``slots`` of each arena or, ``gathered``, as many anywhere."""

    slots: int
    gathered: bool


class FramePlan:
    """``attention.Plan`` for all batches of a frame: its tensors stay where they are, and are filled for each batch.

    The arenas have ``capacity`` slots.
    """

    def __init__(self, rows: int, width: Width, capacity: int, device: torch.device) -> None:
        self._width, self._capacity = width, capacity
        self._device = device
        self.slots_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self._columns: slice | Tensor = slice(0, width.slots)
        if width.gathered:
            self._columns = torch.zeros(width.slots, dtype=torch.int64, device=device)
        self._masks: dict[Span, Tensor] = {}
        self._segments: dict[Span, list[Segment]] = {}
        self._view: BatchView | None = None

    def fill(self, view: BatchView) -> None:
        """Take a batch's slots, positions and masks."""
        self._view = view
        rows = len(self.slots_N)
        self.slots_N.copy_(torch.from_numpy(padded(view.slots, rows)))
        self.positions_N.copy_(torch.from_numpy(padded(view.positions, rows)))
        if isinstance(self._columns, Tensor):
            # All requests' slots one after another, in the order of the columns of ``_mask``.
            slots = np.concatenate([request.slots for request in view.views])
            # A slot that was given away has no place in the arena: any other will do, since the mask hides it.
            placed = np.where(slots < self._capacity, slots, view.slots[-1])
            self._columns.copy_(torch.from_numpy(padded(placed, self._width.slots)))
        # Numbers change, addresses do not: the recorded kernels read these very tensors.
        for span, mask in self._masks.items():
            mask.copy_(self._mask(span))

    def begin(self) -> None:
        """Drop the segments, which cache what a run computes of the masks: a recorded run has to compute it itself."""
        self._segments = {}

    def segments(self, span: Span) -> list[Segment]:
        """All rows as one segment; see ``attention.Plan``."""
        if span not in self._segments:
            if span not in self._masks:
                # Made in the run before the capture: a captured run cannot copy from the host's memory.
                self._masks[span] = self._mask(span).to(self._device)
            self._segments[span] = [Segment(slice(0, len(self.slots_N)), self._columns, self._masks[span])]
        return self._segments[span]

    def _mask(self, span: Span) -> Tensor:
        """The slots that the batch's rows see within the span, as a mask on the CPU: bool [B, S]."""
        assert self._view is not None
        view, mask = self._view, np.zeros((len(self.slots_N), self._width.slots), dtype=bool)
        before = 0
        for request in view.views:
            # Slots out of every layer's reach may have been given away, and have no place in the arena.
            placed, columns = request.slots < self._capacity, request.slots
            if self._width.gathered:
                columns = np.arange(before, before + len(columns))
            mask[request.rows[:, None], columns[None, placed]] = span.of(view, request, slice(None))[:, placed]
            before += len(columns)
        # The padding rows see what the last row sees: one that saw nothing would give NaN.
        mask[len(view) :] = mask[len(view) - 1]
        return torch.from_numpy(mask)


Step = Callable[[Tensor, Tensor, Tensor | None, FramePlan, FramePlan], tuple[Tensor, dict[int, Tensor]]]
"""(tokens_1N, positions_1N, hidden_NX, far, near) -> the rows' states [N, Y], and those of tapped layers [1, N, D]."""


@dataclass(frozen=True)
class Frame:
    """The tensors that a step of so many rows and slots reads."""

    far: FramePlan
    near: FramePlan
    tokens_1N: Tensor
    hidden_NX: Tensor | None

    def fill(self, view: BatchView, near: BatchView, hidden: Tensor | None) -> None:
        rows = self.tokens_1N.shape[1]
        self.tokens_1N.copy_(torch.from_numpy(padded(view.tokens, rows))[None])
        self.far.fill(view)
        if self.near is not self.far:
            self.near.fill(near)
        if hidden is not None:
            assert self.hidden_NX is not None
            self.hidden_NX[: len(hidden)].copy_(hidden)
            self.hidden_NX[len(hidden) :] = self.hidden_NX[len(hidden) - 1]


@dataclass(frozen=True)
class Recorded:
    """A frame's step, and the tensors to which ``replay`` writes the rows' states and those of tapped layers."""

    frame: Frame
    replay: Callable[[], object]
    output_NY: Tensor
    tapped_1ND: dict[int, Tensor]


Key = tuple[int, Width, Width | None, tuple[int, ...]]
"""A frame's rows, its slots in both kinds of arenas where there are two, and the layers that are tapped."""


class Graphs:
    """The recorded steps of a stage, by frame. ``step`` computes one over arenas of ``capacity`` slots."""

    def __init__(self, step: Step, recorder: Recorder, device: torch.device, dtype: torch.dtype, capacity: int) -> None:
        self._step = step
        self._recorder = recorder
        self._device, self._dtype = device, dtype
        self._capacity = capacity
        self._recorded: dict[Key, Recorded] = {}
        self._met: Counter[Key] = Counter()
        self._works = True

    def usual(self, taps: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Rows and slots of the frames that most batches need and that have no graph yet.

        The largest come first: the graphs of others then fit its memory.
        """
        widest = min(self._capacity, USUAL_SLOTS)
        slots = [1 << power for power in range(LEAST_SLOTS.bit_length() - 1, widest.bit_length())]
        rows = [1 << power for power in range(MOST_ROWS.bit_length())]
        for wide, some in product(reversed(slots), reversed(rows)):
            if self._works and (some, Width(wide, False), None, taps) not in self._recorded:
                yield some, wide

    def clear(self) -> None:
        """Drop all graphs, as where arenas have moved."""
        self._recorded.clear()
        self._met.clear()

    def run(
        self, view: BatchView, near: BatchView, near_capacity: int, hidden: Tensor | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """The result of ``step`` for a batch; None where it has to be computed without a graph."""
        if not self._works or len(view) > MOST_ROWS:
            return None
        rows, far = bucket(len(view)), width_of(view, self._capacity)
        key = rows, far, None if near is view else width_of(near, near_capacity), taps
        if rows * far.slots > MOST_CELLS:
            return None
        recorded = self._recorded.get(key)
        if recorded is None:
            self._met[key] += 1
            if self._met[key] > MET_BEFORE:
                recorded = self._record(key, view, near, near_capacity, hidden)
            if recorded is None:
                return None
            self._recorded[key] = recorded
        else:
            # (``_record`` has filled a new frame with its first batch.)
            recorded.frame.fill(view, near, hidden)
        recorded.replay()
        # Copies, since the next replay writes over them.
        tapped = {index: states[:, : len(view)].clone() for index, states in recorded.tapped_1ND.items()}
        return recorded.output_NY[: len(view)].clone(), tapped

    def _record(
        self, key: Key, view: BatchView, near: BatchView, near_capacity: int, hidden: Tensor | None
    ) -> Recorded | None:
        """Record a frame's step with its first batch; None where that does not work, which is not tried again."""
        rows, far, close, _ = key
        plan = FramePlan(rows, far, self._capacity, self._device)
        # One plan serves all layers where none of them frees slots out of reach.
        nearby = plan if close is None else FramePlan(rows, close, near_capacity, self._device)
        tokens_1N = torch.zeros(1, rows, dtype=torch.int64, device=self._device)
        entering = None
        if hidden is not None:
            entering = torch.zeros(rows, hidden.shape[1], dtype=self._dtype, device=self._device)
        frame = Frame(plan, nearby, tokens_1N, entering)
        frame.fill(view, near, hidden)

        def run() -> tuple[Tensor, dict[int, Tensor]]:
            plan.begin()
            nearby.begin()
            return self._step(tokens_1N, plan.positions_N[None], entering, plan, nearby)

        try:
            replay, (output, tapped) = self._recorder.record(run)
        except (RuntimeError, NotImplementedError) as error:  # torch.OutOfMemoryError is one, too
            self._works = False
            self.clear()
            logger.warning("steps are computed without CUDA graphs: %s", str(error).splitlines()[0])
            return None
        return Recorded(frame, replay, output, tapped)


def bucket(count: int) -> int:
    """The least power of two that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def width_of(view: BatchView, capacity: int) -> Width:
    """The slots of the frame for a batch over an arena of ``capacity`` slots."""
    seen = min(capacity, max(LEAST_SLOTS, bucket(sum(len(request.slots) for request in view.views))))
    highest = max(int(request.slots[request.slots < capacity].max()) for request in view.views)
    reached = min(capacity, max(LEAST_SLOTS, bucket(highest + 1)))
    return Width(seen, True) if reached > SCATTERED * seen else Width(reached, False)


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """``values`` and then the last of them again, ``size`` in all."""
    return np.concatenate([values, np.repeat(values[-1:], size - len(values))])
