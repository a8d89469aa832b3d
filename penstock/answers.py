"""The words below an answer in a terminal: how it ended, its gain over plain decoding, and what exactness means."""

from __future__ import annotations

from typing import Final

CUT, FULL, EARLY = "cut", "full", "early"
"""Ends that a reader has to know of: at the limit on tokens, at the end of the model's context, and any other."""
USUAL: Final = (None, "stop", "tool_calls", "function_call")
"""Finish reasons of answers that ended by themselves; None where a server gives none."""
EXACT: Final = "Drafts change the speed alone: the text is the one that plain decoding gives, token for token."
NEARLY: Final = f"{EXACT[:-1]}, unless rounding decides between two that are nearly tied."
MEANINGS: Final = {"exact": EXACT, "fast": NEARLY}
"""The meaning of exactness, by the engine's numerics (``LLM.numerics``)."""


def end_of(finish_reason: str | None, prompt_tokens: int, tokens: int, longest: int | None) -> str | None:
    """``CUT``, ``FULL`` or ``EARLY``; None for an answer that ended by itself.

    ``longest`` is the most tokens that prompt and answer may have together, None if that is not known.
    """
    if finish_reason in USUAL:
        return None
    if finish_reason != "length":
        return EARLY
    return FULL if longest is not None and prompt_tokens + tokens >= longest else CUT


def end_words(end: str, tokens: int, longest: int | None, finish_reason: str | None) -> str:
    """The end in words, as ``cut at 128 tokens``; the way on differs from command to command."""
    if end == EARLY:
        return f"ended early: {finish_reason}"
    return f"the context is full: {longest} tokens" if end == FULL else f"cut at {tokens} tokens"


def gain_words(speed_up: float) -> str:
    """A measured speed beside that of plain decoding: ``1.8 times plain``."""
    return f"{speed_up:.1f} times plain"
