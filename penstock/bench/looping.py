"""Detects outputs that fell into a loop, which flatters every drafter."""

from __future__ import annotations

from collections.abc import Sequence


def is_looping(token_ids: Sequence[int], longest: int = 16, times: int = 3) -> bool:
    """Whether the output ends in one phrase of at most ``longest`` tokens, repeated ``times`` times or more.

    At least twelve tokens must repeat, so that a row of equals signs or blanks does not count.
    """
    for length in range(1, longest + 1):
        count = max(times, -(-12 // length))
        tail = list(token_ids[-length * count :])
        if len(tail) == length * count and tail == tail[:length] * count:
            return True
    return False
