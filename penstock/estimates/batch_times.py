"""How long a batch takes a stage, or a round the drafter, by its number of rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import Final

from penstock.estimates.running_mean import running_mean

SAME: Final = 1e-6
"""Relative difference of two times below which they are the same, rounded."""
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
"""Numbers of rows whose times are kept apart: an octave in four parts, fine enough to find a knee."""
FADES: Final = 32
"""Batches of other sizes within which a time that fades loses half of its lead over the smaller sizes."""
CONFIRMED: Final = 0.75
"""A size that is seen again after its time has faded was as dear as it had looked from this share of that on."""
SELDOMEST: Final = 64 * FADES
"""Batches within which even a time that was confirmed again and again loses half of its lead."""
FURTHER: Final = 2
"""Up to so many times the largest size seen, batches of real devices are taken to be no slower: little is risked."""
ASKED: Final = 256
"""Rows of which the table speaks in any case, whatever was seen: more than a strategy sends of one request."""
SIZE_OF: Final = [SIZES[bisect_left(SIZES, rows)] for rows in range(SIZES[-1] + 1)]
"""The size as which a number of rows counts."""


class BatchTimes:
    """Seconds by number of rows, as they have been seen.

    Means are kept for ``SIZES``, each of the medians of three batches: one batch that was late by itself says nothing,
    and the slowest of many stages would always seem slower than it is. A size between those seen is taken to be as fast
    as they allow, since only sending a batch of it can tell: no faster than a smaller one, nor in time per row than a
    larger one. Above all sizes seen it is taken to be no slower. Below them half of the time is taken to be by the row,
    the other half to be fixed.

    With ``fade``, for real devices, times lie on straight lines between the sizes seen: batches then grow by the rows
    that pay even so, and each that is seen says more of the next. No size is slower than a larger one that was seen.
    Above all sizes batches are no slower up to ``FURTHER`` times as many rows; from there on time is by the row. What
    was seen of a size counts less and less while only others are seen, and is forgotten when the size is seen again:
    its time falls to that of the smaller sizes, or to what a larger one that was seen since leaves to it, as prompts do
    all the time. Real devices vary, and their first batches are late. A size that looks dear is not sent, so that
    nothing else would ever correct its time. One that turns out to be as dear as it had looked fades half as fast from
    then on.
    """

    def __init__(self, fade: bool = False) -> None:
        self._fades = fade
        self._batches = 0
        self._seen: dict[int, int] = {}
        """By size, how many batches there had been when one was last seen."""
        self._fading: dict[int, int] = {}
        """By size, batches within which its time loses half of its lead, where that is not ``FADES``."""
        self._means: dict[int, tuple[float, float]] = {}
        """By size, mean rows and seconds of the batches that count as of this size."""
        self._last: dict[int, tuple[tuple[float, float], tuple[float, float]]] = {}
        """By size, seconds and rows of the two newest batches."""
        self._points: tuple[list[float], list[float]] | None = ([1.0], [0.0])
        """Rows and seconds between which times lie on straight lines; None while they have yet to be found."""
        self._seconds: dict[int, float] = {}
        """``seconds`` by number of rows, as far as it has been asked for since the points last changed."""
        self._growth: dict[int, float] = {}
        """``growth`` likewise."""

    @property
    def means(self) -> dict[int, tuple[float, float]]:
        """By size, mean rows and seconds of what was seen."""
        return dict(self._means)

    def begin_with(self, means: dict[int, tuple[float, float]]) -> None:
        """Nothing has been seen yet: these are taken from another run, as if each size had just been seen."""
        self._means = {size: mean for size, mean in means.items() if size in SIZES and min(mean) > 0}
        self._last = {size: ((seconds, rows),) * 2 for size, (rows, seconds) in self._means.items()}
        self._seen = dict.fromkeys(self._means, 0)
        self._changed()

    def scale(self, factor: float) -> None:
        """All that was seen takes so many times as long."""
        self._means = {size: (rows, factor * seconds) for size, (rows, seconds) in self._means.items()}
        self._last = {
            size: ((factor * older[0], older[1]), (factor * newer[0], newer[1]))
            for size, (older, newer) in self._last.items()
        }
        if self._means:
            self._changed()

    def let_fade(self) -> None:
        """What was seen was seen under other conditions: it counts half, and each size that is seen again anew."""
        self._seen = {size: seen - self._fading.get(size, FADES) for size, seen in self._seen.items()}
        self._changed()

    def _changed(self) -> None:
        """Times are others than before."""
        self._points = None
        self._seconds.clear()
        self._growth.clear()

    def record(self, rows: int, seconds: float) -> bool:
        """Take one batch in. Returns whether that changed the times by more than a hundredth."""
        rows = min(rows, SIZES[-1])
        size, newest = SIZE_OF[rows], (seconds, float(rows))
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
        """One more batch, of this size, whose faded time is forgotten. Returns whether times have faded with it."""
        if not self._fades:
            return False
        if self._age(size):
            _, before = self._means.pop(size)
            self._last.pop(size, None)
            confirmed = seconds >= CONFIRMED * before
            self._fading[size] = min(2 * self._fading.get(size, FADES), SELDOMEST) if confirmed else FADES
        self._batches += 1
        self._seen[size] = self._batches
        if self._batches % FADES or len(self._seen) == 1:
            return False
        self._changed()
        return True

    def _age(self, size: int) -> int:
        """How often the time of a size has lost half of its lead."""
        return (self._batches - self._seen.get(size, self._batches)) // self._fading.get(size, FADES)

    def seconds(self, rows: int) -> float:
        """How long a batch of so many rows takes; 0 while nothing is known."""
        if rows not in self._seconds:
            self._seconds[rows] = self._between(rows)
        return self._seconds[rows]

    def has_seen(self, rows: int) -> bool:
        """Whether a batch of so many rows, or of more, is among what is known."""
        return max(self._means, default=0) >= SIZE_OF[min(rows, SIZES[-1])]

    @property
    def has_seen_one(self) -> bool:
        """Whether a batch of one row is among what is known."""
        return SIZES[0] in self._means

    def growth(self, rows: int) -> float:
        """Log of the share by which a further row makes a batch of so many slower; minus infinity for none."""
        if rows not in self._growth:
            now, then = self.seconds(rows), self.seconds(rows + 1)
            self._growth[rows] = math.log((then - now) / now) if then > now > 0 else -math.inf
        return self._growth[rows]

    def _between(self, rows: float) -> float:
        """Seconds on the straight line between the points on either side; beyond the last of them they stay the same.

        Asked for every batch of every stage. More rows never take less time, whatever rounding does.
        """
        if self._points is None:
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
        """Rows and seconds of the sizes that tell, up to the largest one of use."""
        seen = list(self._means)
        longest = SIZE_OF[min(max(ASKED, FURTHER * max(seen, default=0)), SIZES[-1])]
        return self._between_seen(longest) if self._fades and seen else self._lower_bounds(longest)

    def _lower_bounds(self, longest: int) -> list[tuple[float, float]]:
        """Rows and seconds of every size, the unknown ones as fast as those seen allow."""
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
        """Rows and seconds of the sizes seen, of one row, and of those above all."""
        points = self._faded()
        rows, seconds = points[0]
        if rows > 1:
            points.insert(0, (1.0, seconds * (1 + 1 / rows) / 2))
        rows, seconds = points[-1]
        if FURTHER * rows < longest:
            points += [(FURTHER * rows, seconds), (float(longest), seconds * longest / (FURTHER * rows))]
        return points

    def _faded(self) -> list[tuple[float, float]]:
        """Mean rows and seconds by size, the smallest first, as far as they still count.

        No size is slower than a larger one that was seen as lately: what was late was so by something else.
        """
        sizes = sorted(self._means)
        found = [self._means[size] for size in sizes]
        ages = [self._age(size) for size in sizes]
        least: dict[int, float] = {}
        """By age, the seconds of the fastest of the larger sizes."""
        for i in reversed(range(len(found))):
            rows, seconds = found[i]
            seconds = min([seconds, *(of_age for age, of_age in least.items() if age <= ages[i])])
            least[ages[i]] = min(seconds, least.get(ages[i], math.inf))
            found[i] = rows, seconds
        for i in range(1, len(found)):
            rows, seconds = found[i]
            younger = next((found[j] for j in range(i + 1, len(found)) if ages[j] < ages[i]), None)
            rest = min(seconds, on_line(found[i - 1], younger, rows))
            found[i] = rows, rest + (seconds - rest) * 0.5 ** ages[i]
        return found


def on_line(below: tuple[float, float], above: tuple[float, float] | None, rows: float) -> float:
    """Seconds of so many rows on the straight line between two sizes; those of the lower one if there is no other."""
    if above is None:
        return below[1]
    return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])
