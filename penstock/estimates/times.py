"""Estimates of times: weighted means, a batch's time by its rows, and the time of a message on a link."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import Final

# --------------------------------------------------------------------------------------------------------- running mean
# Exponentially weighted means.

WEIGHT: Final = 0.1
"""Weight of the newest value."""
SLOW: Final = 0.02
"""Weight of the newest value where events are rare."""


def running_mean(mean: float, newest: float, weight: float = WEIGHT) -> float:
    """The mean after ``newest`` has been included."""
    return mean + weight * (newest - mean)


# ---------------------------------------------------------------------------------------------------------- batch times
# Seconds that a batch takes in a stage, or a round in the drafter, by its number of rows.

SAME: Final = 1e-6
"""Relative difference below which two times are equal but for rounding."""
OCTAVES: Final = tuple(16 * 2**octave for octave in range(7))
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
"""Batches of other sizes after which a fading time has lost half of its lead over the smaller sizes."""
CONFIRMED: Final = 0.75
"""Fraction of a faded time from which on a new sight of the size confirms it, so that it fades half as
fast afterwards."""
SELDOMEST: Final = 64 * FADES
"""Upper limit of ``FADES`` for a size that was confirmed again and again, in batches."""
FURTHER: Final = 2
"""Batches of real devices are taken to be no slower up to this multiple of a size seen: little is risked."""
ASKED: Final = 256
"""The table reaches at least this many rows, more than a strategy sends of one request."""
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
        """How many times the time of a size has lost half of its lead."""
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
            # From the smallest size up: the excess over the line from the next smaller size to the next larger one that
            # was seen later halves with every age.
            found[i] = rows, seconds
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
