"""Plain decoding, one token per round trip: the baseline, and the reference for exactness."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.strategies.base import Context, StrategyOptions, now_if
from penstock.tree import Node, TokenTree


@dataclass(frozen=True)
class AutoregressiveOptions(StrategyOptions):
    drafts = False
    most_rows = 0

    def make(self, stages: int) -> Autoregressive:
        return Autoregressive()


class Autoregressive:
    candidates = 0

    rate_limited = False
    sends_root_first = True
    on_trial = False

    def corrects(self, context: Context) -> bool:
        return False

    def holds_results(self, context: Context) -> bool:
        return False

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        return []

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        return now_if(not tree.root.entered)

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return False

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        return [tree.root]
