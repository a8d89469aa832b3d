"""Estimates of times: a batch's by its rows, a message's on a link, a pipeline's steps and latencies."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Final

from penstock.messages import Span

# --------------------------------------------------------------------------------------------------------- running mean
# Exponentially weighted means.

WEIGHT: Final = 0.1
"""Weight (0 to 1) of the newest value in a running mean. About the last ten count."""
SLOW: Final = 0.02
"""Weight (0 to 1) of the newest value in a running mean that is to change slowly. About the last 50 count."""


def running_mean(mean: float, newest: float, weight: float = WEIGHT) -> float:
    """The exponentially weighted mean after ``newest`` has been included."""
    return mean + weight * (newest - mean)


# ---------------------------------------------------------------------------------------------------------- batch times
# Seconds that a batch takes in a stage, or a round in the drafter, by its number of rows.

SAME: Final = 1e-6
"""Relative difference up to which two times are equal but for rounding. Emulated devices repeat their times up to that,
and nothing has to be computed anew then."""
OCTAVES: Final = tuple(16 * 2**octave for octave in range(7))
"""The numbers of rows at which octaves begin: 16, 32, ..., 1024."""
SIZES: Final[tuple[int, ...]] = (
    1,
    2,
    4,
    8,
    12,
    *(quarter * octave // 4 for octave in OCTAVES for quarter in range(4, 8)),
    2048,
)
"""Numbers of rows with a mean of their own: four to an octave, fine enough to find the knee of a curve."""
FADES: Final = 32
"""Number of batches of other sizes after which a fading time has lost half of its lead over the smaller sizes. With
fewer a size that is too slow is tried more often; with more a single slow batch keeps a size out for longer."""
CONFIRMED: Final = 0.75
"""Fraction of a faded time from which on a new sight of the size confirms it, so that it fades half as fast afterwards.
At 1 a sight that is a little quicker than the last would not confirm it."""
SELDOMEST: Final = 64 * FADES
"""Number of batches up to which ``FADES`` grows for a size that was confirmed again and again. Six doublings lead
there."""
FURTHER: Final = 2
"""Multiple of a size seen up to which batches of real devices are taken to be no slower: little is risked."""
ASKED: Final = 256
"""Number of rows that the table covers at least: more than a strategy sends of one request."""
SIZE_OF: Final = [SIZES[bisect_left(SIZES, rows)] for rows in range(SIZES[-1] + 1)]
"""The entry of ``SIZES`` under which a number of rows is counted, by number of rows."""


class BatchTimes:
    """Seconds of a batch by its number of rows, learned from the batches seen.

    A mean is kept for each of ``SIZES``, taken over medians of three batches: a single late batch must not count, and
    the slowest of many stages would otherwise always seem slower than it is. A size between those seen is estimated as
    fast as they allow, since only sending such a batch can tell: no faster than a smaller size, and no less time per
    row than a larger one. Sizes above all those seen are taken to be no slower. Below them half of the time is taken to
    grow with the rows, and the other half to be fixed.

    With ``fade``, for real devices, times lie on straight lines between the sizes seen, but a size of ``FURTHER`` times
    as many rows as one seen is taken to be as fast as larger ones allow, until it is seen. So each size is tried once,
    and a batch risks at most the time by which it is slower than half of its rows. On the line to a prompt's many rows
    a second row can look too dear to be ever sent. No size is slower than a larger one that was seen. Above all sizes a
    batch is no slower up to ``FURTHER`` times as many rows, and beyond that its time is proportional to its rows.

    A time also fades: the mean of a size counts less and less while only other sizes are seen, and is dropped when the
    size is seen again. It falls to the time of the smaller sizes, or to what a larger size seen since allows, as
    prompts provide all the time. Fading is needed because real devices vary and their first batches are late: a size
    that looks expensive is not sent, so nothing else would ever correct it. A size that proves to be as expensive as it
    looked fades half as fast from then on.
    """

    def __init__(self, fade: bool = False) -> None:
        self._fades = fade
        self._batches = 0
        self._seen: dict[int, int] = {}
        """Value of ``_batches`` when a batch of this size was last seen, by size."""
        self._fading: dict[int, int] = {}
        """Batches after which a size's time has lost half of its lead, by size; ``FADES`` where there is no entry."""
        self._means: dict[int, tuple[float, float]] = {}
        """Mean rows and mean seconds of the batches counted under each size."""
        self._last: dict[int, tuple[tuple[float, float], tuple[float, float]]] = {}
        """(seconds, rows) of the two newest batches of each size, the older first."""
        self._points: tuple[list[float], list[float]] | None = ([1.0], [0.0])
        """Rows and seconds of the points between which times are interpolated; None until they are computed again."""
        self._seconds: dict[int, float] = {}
        """Cache of ``seconds`` by number of rows, cleared when the points change."""
        self._growth: dict[int, float] = {}
        """Cache of ``growth`` by number of rows, cleared when the points change."""

    @property
    def means(self) -> dict[int, tuple[float, float]]:
        """Mean rows and seconds of the batches seen, by size."""
        return dict(self._means)

    def begin_with(self, means: dict[int, tuple[float, float]]) -> None:
        """Take over the means of another run as if each size had just been seen. Call before anything is recorded."""
        self._means = {size: mean for size, mean in means.items() if size in SIZES and min(mean) > 0}
        self._last = {size: ((seconds, rows),) * 2 for size, (rows, seconds) in self._means.items()}
        self._seen = dict.fromkeys(self._means, 0)
        self._changed()

    def scale(self, factor: float) -> None:
        """Multiply all times by ``factor``."""
        self._means = {size: (rows, factor * seconds) for size, (rows, seconds) in self._means.items()}
        self._last = {
            size: ((factor * older[0], older[1]), (factor * newer[0], newer[1]))
            for size, (older, newer) in self._last.items()
        }
        if self._means:
            self._changed()

    def let_fade(self) -> None:
        """Age every size by one halving, because conditions have changed: each counts half, and is measured anew when
        seen."""
        self._seen = {size: seen - self._fading.get(size, FADES) for size, seen in self._seen.items()}
        self._changed()

    def _changed(self) -> None:
        """Drop everything that was derived from the means."""
        self._points = None
        self._seconds.clear()
        self._growth.clear()

    def record(self, rows: int, seconds: float) -> bool:
        """Record one batch. Returns whether that changed the times by more than a hundredth."""
        rows = min(rows, SIZES[-1])
        size, newest = SIZE_OF[rows], (seconds, float(rows))
        # The size's old mean is dropped first if it has faded, so that what follows begins anew for it.
        faded = self._count(size, seconds)
        older, newer = self._last.get(size, (newest, newest))
        self._last[size] = newer, newest
        # The median of three by seconds: one late batch does not count.
        typical, of_rows = sorted((older, newer, newest))[1]
        if size in self._means:
            rows_before, before = self._means[size]
            if of_rows == rows_before and abs(typical - before) <= SAME * before:
                return faded
            mean = running_mean(rows_before, of_rows), running_mean(before, typical)
        else:
            mean = of_rows, typical
        self._means[size] = mean
        if not faded and abs(mean[1] - self._between(mean[0])) <= 0.01 * mean[1]:
            return False
        self._changed()
        return True

    def _count(self, size: int, seconds: float) -> bool:
        """Count a batch of this size and drop the size's mean if it has faded. Returns whether other times have faded
        now."""
        if not self._fades:
            return False
        if self._age(size):
            _, before = self._means.pop(size)
            self._last.pop(size, None)
            confirmed = seconds >= CONFIRMED * before
            self._fading[size] = min(2 * self._fading.get(size, FADES), SELDOMEST) if confirmed else FADES
        self._batches += 1
        self._seen[size] = self._batches
        # Ages are whole halvings, so the points can only change at multiples of FADES.
        if self._batches % FADES or len(self._seen) == 1:
            return False
        self._changed()
        return True

    def _age(self, size: int) -> int:
        """Number of times that the time of a size has lost half of its lead."""
        return (self._batches - self._seen.get(size, self._batches)) // self._fading.get(size, FADES)

    def seconds(self, rows: int) -> float:
        """Seconds that a batch of ``rows`` takes; 0 while nothing is known."""
        if rows not in self._seconds:
            self._seconds[rows] = self._between(rows)
        return self._seconds[rows]

    def has_seen(self, rows: int) -> bool:
        """Whether a batch of ``rows`` rows, or of more, has been seen."""
        return max(self._means, default=0) >= SIZE_OF[min(rows, SIZES[-1])]

    @property
    def has_seen_one(self) -> bool:
        """Whether a batch of one row has been seen."""
        return SIZES[0] in self._means

    def growth(self, rows: int) -> float:
        """Log of the relative increase in time that one further row causes; minus infinity if it causes none."""
        if rows not in self._growth:
            now, then = self.seconds(rows), self.seconds(rows + 1)
            self._growth[rows] = math.log((then - now) / now) if then > now > 0 else -math.inf
        return self._growth[rows]

    def _between(self, rows: float) -> float:
        """Seconds interpolated between the points on either side; beyond the last point they stay the same.

        Called for every batch of every stage. More rows never take less time, whatever rounding does.
        """
        if self._points is None:
            # The running maximum keeps times monotone in rows.
            rows_of, seconds_of = zip(*self._find_points(), strict=True)
            self._points = list(rows_of), list(accumulate(seconds_of, max))
        numbers, times = self._points
        after = bisect_left(numbers, rows)
        if after in (0, len(numbers)):
            return times[min(after, len(numbers) - 1)]
        below, above = times[after - 1], times[after]
        share = (rows - numbers[after - 1]) / (numbers[after] - numbers[after - 1])
        return min(below + share * (above - below), above)

    def _find_points(self) -> list[tuple[float, float]]:
        """Rows and seconds of the points to interpolate between, up to the largest size of use."""
        seen = list(self._means)
        longest = SIZE_OF[min(max(ASKED, FURTHER * max(seen, default=0)), SIZES[-1])]
        return self._between_seen(longest) if self._fades and seen else self._lower_bounds(longest)

    def _lower_bounds(self, longest: int) -> list[tuple[float, float]]:
        """Rows and seconds of every size; sizes not seen are as fast as those seen allow."""
        seen = sorted(self._means)
        points: list[tuple[float, float]] = []
        for size in SIZES[: SIZES.index(longest) + 1]:
            after = bisect_left(seen, size)
            least, rows = points[-1][1] if points else 0.0, float(size)
            if after < len(seen):
                of_rows, seconds = self._means[seen[after]]
                if seen[after] == size:
                    rows = of_rows
                share = rows / of_rows
                least = max(least, seconds * (share if after else (1 + share) / 2))
            points.append((rows, least))
        return points

    def _between_seen(self, longest: int) -> list[tuple[float, float]]:
        """Rows and seconds of one row, of the sizes seen, and of the extrapolation above them."""
        points = self._faded()
        rows, seconds = points[0]
        # Half of the time of the smallest size seen is taken to be fixed, half to grow with the rows.
        if rows > 1:
            points.insert(0, (1.0, seconds * (1 + 1 / rows) / 2))
        # A size beyond each one seen is tried as if it took no longer, if the next one seen allows that.
        tried = [
            (FURTHER * rows, max(seconds, FURTHER * rows / larger * of_larger))
            for (rows, seconds), (larger, of_larger) in pairwise(points)
            if FURTHER * rows < larger
        ]
        points = sorted([*points, *tried])
        rows, seconds = points[-1]
        if FURTHER * rows < longest:
            points += [(FURTHER * rows, seconds), (float(longest), seconds * longest / (FURTHER * rows))]
        return points

    def _faded(self) -> list[tuple[float, float]]:
        """Mean rows and seconds by size, smallest first, after fading.

        No size is slower than a larger one seen as recently: whatever made it late was not its number of rows.
        """
        sizes = sorted(self._means)
        found = [self._means[size] for size in sizes]
        ages = [self._age(size) for size in sizes]
        least: dict[int, float] = {}
        """Seconds of the fastest larger size, by age."""
        # From the largest size down: a size is capped by every larger one of the same age or younger.
        for i in reversed(range(len(found))):
            rows, seconds = found[i]
            seconds = min([seconds, *(of_age for age, of_age in least.items() if age <= ages[i])])
            least[ages[i]] = min(seconds, least.get(ages[i], math.inf))
            found[i] = rows, seconds
        # From the smallest size up, so that the next smaller one has faded already: the excess over the line from it to
        # the next larger size that was seen later halves with every age.
        for i in range(1, len(found)):
            rows, seconds = found[i]
            younger = next((found[j] for j in range(i + 1, len(found)) if ages[j] < ages[i]), None)
            rest = min(seconds, on_line(found[i - 1], younger, rows))
            found[i] = rows, rest + (seconds - rest) * 0.5 ** ages[i]
        return found


def on_line(below: tuple[float, float], above: tuple[float, float] | None, rows: float) -> float:
    """Seconds of ``rows`` on the straight line between two sizes; those of the lower one if there is no upper one."""
    if above is None:
        return below[1]
    return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])


# ----------------------------------------------------------------------------------------------------------- link times
# Seconds that rows take from one stage to the next.


class LinkTimes:
    """The least time, and the least time per row, that a batch has taken over a link.

    A measurement may include waiting for the next stage's buffer, so minima are kept and no means.
    """

    def __init__(self) -> None:
        self._latency = self._per_row = math.inf

    def record(self, rows: int, seconds: float) -> bool:
        """Record a batch. Returns whether it was faster than all before it."""
        if seconds >= self._latency and seconds / rows >= self._per_row:
            return False
        self._latency, self._per_row = min(self._latency, seconds), min(self._per_row, seconds / rows)
        return True

    def seconds(self, rows: int) -> float:
        """Seconds that a batch of ``rows`` takes; infinite while nothing is known."""
        return max(self._latency, self._per_row * min(rows, SIZES[-1]))

    def there_and_back(self, rows: int) -> float:
        """Seconds until the next batch can follow, which includes the way back of the other stage's acknowledgement."""
        return self.seconds(rows) + self._latency


# -------------------------------------------------------------------------------------------------------------- overlap
# Measures how much slower the stages of a host are while other stages of it compute.

TAKEN: Final = 1.5
"""Factor by which CPU stages are assumed to be slower beside others, until that has been measured. It lies above
``SLOWED``, so that they take turns until a measurement says otherwise."""
SLOWED: Final = 1.2
"""Factor of slowdown from which on stages had better take turns. In simulation two stages gain nothing by overlapping
from 1.15 on, four from 1.3 on."""
ENOUGH: Final = 4
"""Number of measurements from which on the slowdown counts as known. The median of four is not decided by one of
them."""
KEPT: Final = 9
"""Number of the newest measurements, whose median is the slowdown. Five of them have to change before the median
does."""
ALONE: Final = 0.05
"""Fraction of a batch's time in a stage up to which others may compute beside it if it is to count as alone. At 0
hardly a batch of a full pipeline would count."""
BESIDE: Final = 0.5
"""Fraction of a batch's time in a stage from which on it counts as beside others. A batch between ``ALONE`` and this
counts as neither."""
FORGOTTEN: Final = 1024
"""Number of batches without a new measurement after which the slowdown is forgotten: hosts change."""


@dataclass(frozen=True)
class Passed:
    """A finished batch, and for each of its spans the seconds during which other stages computed other batches."""

    spans: Sequence[Span]
    beside: list[float]


class Overlap:
    """Compares a batch's time in a stage alone with its time while other stages compute. All stages share one clock.

    Contention slows the reading of weights, which takes as long for one row as for many. A batch of many rows, whose
    time is several times that of one row, is therefore slowed hardly at all.
    """

    def __init__(self) -> None:
        self._alone: defaultdict[int, BatchTimes] = defaultdict(partial(BatchTimes, True))
        self._open: list[Passed] = []
        """Finished batches with which a later one may still have overlapped."""
        self._times: deque[float] = deque(maxlen=KEPT)
        """Ratios of the newest batches' times beside others to their times alone."""
        self._since = 0
        """Batches since the newest of these ratios."""

    @property
    def slower(self) -> float:
        """Factor, at least 1, by which one row is slower in a stage while others compute; 0 while it is not known."""
        # Batches of many rows tell little of one row: what their times vary by can be more than it takes alone, and the
        # median below 0. Times that are scaled by that would be negative, and no rate the best one.
        return max(1.0, median(self._times)) if len(self._times) >= ENOUGH else 0.0

    def slows(self, share: float = 1.0) -> bool:
        """Whether stages had better take turns with batches of which one row would take ``share`` of the time."""
        return self.factor(share) >= SLOWED

    def factor(self, share: float) -> float:
        """Factor by which such batches are slower in a stage while others compute; 1 while that is not known."""
        return 1 + max(0.0, self.slower - 1) * share

    def begin_with(self, slower: float) -> None:
        """Begin with the slowdown that another run has found, or that is assumed; 0 changes nothing.

        It takes the place of what was begun with before: a slowdown that was found is not averaged with an assumed one.
        """
        if slower:
            self._times.clear()
            self._times.extend([slower] * ENOUGH)

    def record(self, spans: Sequence[Span]) -> None:
        """Record a finished batch. Batches come out in the order in which they entered."""
        self._since += 1
        if self._since > FORGOTTEN:
            self._times.clear()
        worked = [span for span in spans if span.rows]
        if not worked:
            return
        newest = Passed(worked, [0.0] * len(worked))
        for earlier in self._open:
            add_overlaps(earlier, newest)
        # Batches enter in order, so nothing that ended before this batch began can overlap with a later one.
        begun = worked[0].start
        for passed in [one for one in self._open if one.spans[-1].end <= begun]:
            self._open.remove(passed)
            self._take_in(passed)
        self._open.append(newest)

    def _take_in(self, passed: Passed) -> None:
        for span, beside in zip(passed.spans, passed.beside, strict=True):
            seconds, alone = span.end - span.start, self._alone[span.stage]
            if seconds <= 0:
                continue
            if beside <= ALONE * seconds:
                alone.record(span.rows, seconds)
            elif beside >= BESIDE * seconds and alone.has_seen(span.rows) and alone.has_seen_one:
                # Only the part of the time that one row takes, and of it the part beside others, was slowed.
                share = min(1.0, beside / seconds) * alone.seconds(1) / alone.seconds(span.rows)
                self._times.append(1 + (seconds / alone.seconds(span.rows) - 1) / share)
                self._since = 0


def add_overlaps(earlier: Passed, later: Passed) -> None:
    """Add to the ``beside`` of both batches the seconds during which stages computed both at once."""
    for i, one in enumerate(earlier.spans):
        for j, other in enumerate(later.spans):
            both = min(one.end, other.end) - max(one.start, other.start)
            if both > 0:
                earlier.beside[i] += both
                later.beside[j] += both


# ------------------------------------------------------------------------------------------------------- pipeline times
# Seconds that a batch occupies the slowest stage or link, and seconds that it takes through all of them.

HARDLY: Final = 1.1
"""Ratio up to which two times count as hardly different. Rows are dear where a batch of ``scheduler.WANTED`` rows takes
longer than that."""


class PipelineTimes:
    """Times of all stages and of the links between them.

    Where a stage shares its device with the drafter, each of its batches is charged the passes between two batches,
    unless the drafter rests. Where stages slow each other so much that overlapping gains nothing, batches go one after
    another, and a step is a whole trip (``Overlap``). Several requests still gain by overlapping where one batch for
    all of them would take longer than one batch for each stage.

    ``fade``: whether the stages' times fade (``BatchTimes``). ``apart``: the stages whose batches leave for another
    host; -1 is the engine. Times of different hosts are never subtracted, since their clocks differ: what remains of a
    round trip by the engine's clock is divided equally among such hops. ``slowed``: the assumed slowdown of stages
    while others compute, until it has been measured; None lets batches overlap whatever that costs.
    """

    def __init__(self, fade: bool = False, apart: frozenset[int] = frozenset(), slowed: float | None = 0.0) -> None:
        self.apart = apart
        self._overlaps = slowed is None or bool(apart)
        self._stages: defaultdict[int, BatchTimes] = defaultdict(partial(BatchTimes, fade))
        self._links: defaultdict[int, LinkTimes] = defaultdict(LinkTimes)
        self._drafter_turns: dict[int, float] = {}
        """Seconds that the drafter holds a stage's device between two batches, by stage; a running mean."""
        self._held: defaultdict[int, float] = defaultdict(float)
        """Seconds that the drafter has held a stage's device since the last batch came out, by stage."""
        self.pass_s = 0.0
        """Seconds of one pass of a drafter that shares a stage's device; a running mean, 0 while none was seen."""
        self._rests = False
        """Whether the drafter is not asked at present."""
        self._overlap = Overlap()
        self._requests = 1
        """Number of requests that decode at present."""
        self._taken_off = 0.0
        """Factor by which times were divided when stages began to take turns; 0 while they have not."""
        self._known: dict[int, tuple[float, float]] = {}
        """Cache of step and latency in seconds by number of rows, cleared when the times change."""
        self.begin_with_slower(slowed or 0.0)

    @property
    def means(self) -> dict[int, dict[int, tuple[float, float]]]:
        """``BatchTimes.means`` of each stage."""
        return {stage: times.means for stage, times in self._stages.items()}

    def begin_with(self, means: dict[int, dict[int, tuple[float, float]]]) -> None:
        """``BatchTimes.begin_with`` for each stage."""
        for stage, of_stage in means.items():
            self._stages[stage].begin_with(of_stage)
        self._known.clear()

    def scale(self, factor: float) -> None:
        """Multiply every stage's times by ``factor``."""
        for times in self._stages.values():
            times.scale(factor)
        self._known.clear()

    @property
    def slower(self) -> float:
        """``Overlap.slower``: the measured slowdown of stages while others compute; 0 while that is not known."""
        return self._overlap.slower

    def begin_with_slower(self, slower: float) -> None:
        """``Overlap.begin_with``, if overlapping is measured at all."""
        if not self._overlaps:
            self._overlap.begin_with(slower)
            self._known.clear()

    @property
    def shared(self) -> bool:
        """Whether a stage and the drafter take turns on one device."""
        return bool(self._drafter_turns)

    @property
    def one_after_another(self) -> bool:
        """Whether batches of a row do not overlap: there is a single stage, or stages slow each other too much."""
        step, latency = self.step_and_latency_s(1)
        return 0 < latency <= step

    def record_spans(self, spans: Sequence[Span]) -> None:
        """Record the stages' times for a finished batch."""
        changed = False
        for span in spans:
            if span.rows:
                changed |= self._stages[span.stage].record(span.rows, span.end - span.start)
        for one, other in pairwise(spans):
            if one.rows and one.stage not in self.apart:
                changed |= self._links[one.stage].record(one.rows, other.received - one.end)
        if self._drafter_turns and not self._rests and any(span.rows for span in spans):
            for stage, mean in self._drafter_turns.items():
                self._drafter_turns[stage] = running_mean(mean, self._held.pop(stage, 0.0))
            changed = True
        if changed:
            self._known.clear()

    def record_overlap(self, spans: Sequence[Span]) -> None:
        """Record when real stages worked on a finished batch, which tells whether they slow each other."""
        if self._overlaps:
            return
        before, in_turn = self.slower, self._overlap.slows()
        self._overlap.record(spans)
        if self._overlap.slows() != in_turn:  # times were measured in the other mode
            self._begin_overlapping() if in_turn else self._begin_turns()
        if self.slower != before:
            self._known.clear()

    def _begin_turns(self) -> None:
        """Remove the slowdown from the times. It is that of one row; larger batches were slowed less, as will be
        measured."""
        self._taken_off = self.slower
        self._change_over(1 / self._taken_off)

    def _begin_overlapping(self) -> None:
        """Multiply the times by their former divisor, because stages were found to slow each other little.

        Changing to and fro any number of times thereby changes nothing.
        """
        self._change_over(self._taken_off or self.slower or 1.0)

    def _change_over(self, factor: float) -> None:
        self.scale(factor)
        for times in self._stages.values():
            times.let_fade()

    def decode(self, requests: int) -> None:
        """Set the number of requests that decode from now on."""
        if requests != self._requests:
            self._requests = requests
            self._known.clear()

    def record_round_trip(self, spans: Sequence[Span], seconds: float) -> None:
        """Record the seconds from a batch's entering to its result, by the engine's clock."""
        if not self.apart or not all(span.rows for span in spans):
            return
        elsewhere = sum(span.end - span.received for span in spans)
        elsewhere += sum(two.received - one.end for one, two in pairwise(spans) if one.stage not in self.apart)
        each = max(0.0, seconds - elsewhere) / len(self.apart)
        for one in spans[:-1]:
            if one.stage in self.apart and self._links[one.stage].record(one.rows, each):
                self._known.clear()

    def record_drafter_turn(self, stage: int, seconds: float) -> None:
        """Record that the drafter held a stage's device for ``seconds``, in one pass."""
        if stage not in self._drafter_turns:
            self._drafter_turns[stage] = seconds
            self._known.clear()
        self._held[stage] += seconds
        self.pass_s = running_mean(self.pass_s or seconds, seconds)

    def rests(self, rests: bool) -> None:
        """Set whether the drafter rests, so that no stage has to give up its device."""
        if rests != self._rests:
            self._rests = rests
            self._known.clear()

    def step_s(self, rows: int) -> float:
        """Seconds between batches of ``rows`` at the slowest stage or link; 0 while nothing is known."""
        return self.step_and_latency_s(rows)[0]

    def latency_s(self, rows: int) -> float:
        """Seconds through all stages and the links between them; 0 while nothing is known."""
        return self.step_and_latency_s(rows)[1]

    def has_seen(self, rows: int) -> bool:
        """Whether every stage has seen batches of ``rows`` rows or more."""
        return bool(self._stages) and all(one.has_seen(rows) for one in self._stages.values())

    def step_and_latency_s(self, rows: int) -> tuple[float, float]:
        """``step_s`` and ``latency_s`` of batches of ``rows`` rows, which are mostly wanted together."""
        return self._known.get(rows) or self._look_up(rows)

    def _look_up(self, rows: int) -> tuple[float, float]:
        turns = {} if self._rests else self._drafter_turns
        computing = [times.seconds(rows) for times in self._stages.values()]
        stages = [seconds + turns.get(stage, 0.0) for stage, seconds in zip(self._stages, computing, strict=True)]
        links = [times.seconds(rows) for times in self._links.values()]
        hops = [times.there_and_back(rows) for times in self._links.values()]
        latency = sum(stages + links)
        step = latency if self.in_turn(rows) else max(stages + hops, default=0.0)
        self._known[rows] = found = step, latency
        return found

    def in_turn(self, rows: int) -> bool:
        """Whether batches of ``rows`` are to go through the stages one after another."""
        computing = [times.seconds(rows) for times in self._stages.values()]
        if not any(computing):
            return False
        share = sum(times.seconds(1) for times in self._stages.values()) / sum(computing)
        batches = min(len(computing), self._requests)
        if batches == 1 or not self._overlap.slows(share):
            return self._overlap.slows(share)
        # Compare one batch for all requests with as many overlapping ones, which are slowed.
        in_one = sum(times.seconds(batches * rows) for times in self._stages.values())
        return in_one <= batches * max(computing) * self._overlap.factor(share)
