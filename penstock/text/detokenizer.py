"""Incremental detokenization, in which text once given out stays, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from penstock.text.tokenizer import Tokenizer

UNFINISHED: Final = "\ufffd"
"""The replacement character, to which a tokenizer decodes bytes that are not (or not yet) a character."""

CONTEXT: Final = 8
"""Tokens decoded again in front of a new one. They hold at least 8 bytes; a UTF-8 decoder that starts anywhere agrees
with one that started earlier after 3 bytes."""


class IncrementalDetokenizer:
    """The text of one completion, piece by piece.

    The pieces together are ``tokenizer.decode`` of prompt and completion without the prompt's own text, cut at the
    first stop string. A piece never holds part of a character, nor text that may turn out to begin a stop string. The
    cost of a token does not depend on how many came before.

    ``stopped`` is the stop string that was found; no text follows it. The stop string itself is cut off unless
    ``include_stop_str_in_output``. A stop string that ends within the text of the first ``min_tokens`` tokens is
    ignored; one that only begins there counts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop_str_in_output)
        self._too_early = min_tokens

    @property
    def stopped(self) -> str | None:
        return self._matcher.found

    def append(self, token_id: int) -> str:
        """The text that has become final with this token."""
        if self.stopped is not None:
            return ""
        text = self._decoder.append(token_id)
        if self._too_early > 0:
            self._too_early -= 1
            return self._matcher.pass_on(text)
        return self._matcher.push(text)

    def finish(self) -> str:
        """The text held back so far, when no more tokens follow. Bytes that never became a character are U+FFFD."""
        if self.stopped is not None:
            return ""
        return self._matcher.push(self._decoder.finish()) + self._matcher.flush()


class StreamDecoder:
    """A decoder that decodes a window of the last tokens and gives out the new part of its text.

                  context            new
        ids     [ .  .  .  .  .  . | .  .  t ]      decode(window)[done:final] is given out, where ``final`` leaves out
        text      w i n d o w  t e x t  .  \\ufffd   a last U+FFFD: it may become a character with the next token
                                   done   final

    The method is that of vLLM and TGI (prefix and read offset), with two additions that make the pieces equal to
    decoding everything at once: bytes that can never become a character leave the window too, and a run of
    byte-fallback tokens waits for its end, since one invalid byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._done = 0
        self._move_window(prompt_ids)

    def append(self, token_id: int) -> str:
        """The text that has become final with this token; empty while its bytes may change."""
        # A token without text leaves the window as it is: nothing has to be decoded.
        if self._tokenizer.is_silent(token_id, self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        # The run of byte-fallback tokens may go on, and a later invalid byte would change the text of all of it.
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._text()
        final = self._final_length(text)
        piece, self._done = text[self._done : final], final
        # The window grows to twice its context before it is cut, so that cutting costs a token little.
        if len(self._window) >= 2 * CONTEXT:
            self._move_window(self._window)
        return piece

    def finish(self) -> str:
        """The rest of the text, when no more tokens follow."""
        text = self._text()
        piece, self._done = text[self._done :], len(text)
        return piece

    def _text(self) -> str:
        """The text of the window."""
        return self._tokenizer.decode(self._window, self._skip_special_tokens)

    def _final_length(self, text: str) -> int:
        """Length of the part of the window's ``text`` that no later token changes.

        Only bytes at the end may still become characters. They are those of one character, shown as one U+FFFD, or,
        when a prompt ends in the middle of a run of byte-fallback tokens, those of the whole run, one U+FFFD each.
        """
        in_byte_run = takewhile(self._tokenizer.byte_ids.__contains__, reversed(self._window))
        uncertain = max(sum(1 for _ in in_byte_run), 1)
        return len(text) - min(len(text) - len(text.rstrip(UNFINISHED)), uncertain)

    def _move_window(self, ids: Sequence[int]) -> None:
        """Keep the last tokens of ``ids`` only, and count all their final text as given out."""
        kept: list[int] = []
        for token_id in reversed(ids):
            # The window begins in front of a run of byte-fallback tokens, never within: it is decoded as a whole.
            if len(kept) >= CONTEXT and kept[-1] not in self._tokenizer.byte_ids:
                break
            if not self._tokenizer.is_silent(token_id, self._skip_special_tokens):
                kept.append(token_id)
        self._window = kept[::-1]
        self._done = self._final_length(self._text())


class StopMatcher:
    """A filter that passes text on up to the first stop string, holding back an end that may begin one.

    The stop string that is complete first wins, as if the text came character by character; of several that end at the
    same character, the longest.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self.found: str | None = None
        self._stop = stop
        self._include = include
        self._held = ""
        self._passed = 0
        """Characters at the beginning of the held text in which no stop string may end."""

    def pass_on(self, text: str) -> str:
        """Like ``push``, but ignores stop strings that end in this text; one that begins in it may end later."""
        self._held += text
        self._passed = len(self._held)
        return self._release(len(self._held) - self._beginning())

    def push(self, text: str) -> str:
        """The part of the held and the new ``text`` that may be given out."""
        self._held += text
        # A stop string that ends within the passed text does not count: its last character has to lie behind that.
        matches = [(self._held.find(stop, max(self._passed - len(stop) + 1, 0)), stop) for stop in self._stop]
        ends = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        if ends:
            end, start, self.found = min(ends)  # the earliest end; among equal ones the earliest start: the longest
            return self._release(end if self._include else start)
        return self._release(len(self._held) - self._beginning())

    def flush(self) -> str:
        """The held text, when no more text follows; "" once a stop string was found."""
        return "" if self.found is not None else self._release(len(self._held))

    def _release(self, length: int) -> str:
        """Give out the first ``length`` characters of the held text."""
        text, self._held = self._held[:length], self._held[length:]
        self._passed = max(self._passed - length, 0)
        return text

    def _beginning(self) -> int:
        """Length of the longest suffix of the held text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
