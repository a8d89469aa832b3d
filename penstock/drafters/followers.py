"""An index of the tokens that followed each short run of tokens in a text. It grows with the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence


class Followers:
    """For every run of ``shortest`` to ``longest`` tokens of a text, the tokens that followed it.

    A look-up takes as long in a long text as in a short one: it visits different followers, not occurrences.

        text         1  2  7  1  2  8  1  2
        after 2      7, then 8: the most recent one last
        after 1 2    7, then 8
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest = longest
        self.length = 0
        """Number of tokens of the text so far."""
        self._after: dict[int, dict[tuple[int, ...], int | dict[int, None]]] = {
            length: {} for length in range(longest, shortest - 1, -1)
        }
        """The only follower of a run or, where there have been several, a dict of them in the order of their last
        occurrence; by length and run."""
        self._tail: deque[int] = deque(maxlen=longest)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            tail = tuple(self._tail)
            for length, after in self._after.items():
                if length <= len(tail):
                    _note(after, tail[-length:], token)
            self._tail.append(token)
            self.length += 1

    def after(self, above: Sequence[int], count: int) -> dict[int, int]:
        """Up to ``count`` tokens that have followed the end of the text with ``above`` appended to it.

        Occurrences within ``above`` count, too. Each token is mapped to the length of the longest run that it followed;
        longer runs come first, then more recent followers.
        """
        found: dict[int, int] = {}
        for token, length in self._occurrences(above):
            found.setdefault(token, length)
            if len(found) == count:
                break
        return found

    def _occurrences(self, above: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The matches of ``after`` in order; a token may come more than once."""
        tokens = [*self._tail, *above]
        for length, after in self._after.items():
            if length > len(tokens):
                continue
            run = tuple(tokens[-length:])
            # Followers within ``above`` are more recent than any in the index, so they come first.
            yield from ((token, length) for token in _followed(tokens, length, len(tokens) - len(above)))
            found = after.get(run, ())
            yield from ((token, length) for token in ((found,) if isinstance(found, int) else reversed(found)))


def _note(after: dict[tuple[int, ...], int | dict[int, None]], run: tuple[int, ...], token: int) -> None:
    known = after.get(run)
    if known is None or known == token:
        after[run] = token
        return
    if isinstance(known, int):
        after[run] = known = {known: None}
    # Removed and inserted again, the token becomes the dict's last key, which is the most recent follower.
    known.pop(token, None)
    known[token] = None


def _followed(tokens: Sequence[int], length: int, first: int) -> Iterator[int]:
    """The tokens from index ``first`` on that follow the last ``length`` tokens, most recent first."""
    run = tokens[-length:]
    for place in range(len(tokens) - 1, max(first, length) - 1, -1):
        if tokens[place - length : place] == run:
            yield tokens[place]
