"""The plain pipeline: one token per round trip. The baseline, and the reference for exactness."""

from __future__ import annotations

from penstock.tree import Node, TokenTree


class Autoregressive:
    candidates = 0

    rate_limited = False
    sends_root_first = True
    corrects = False

    def ask(self, tree: TokenTree) -> list[Node]:
        return []

    def ready(self, tree: TokenTree) -> bool:
        return not tree.root.entered

    def can_piggyback(self, tree: TokenTree) -> bool:
        return False

    def enter(self, tree: TokenTree) -> list[Node]:
        return [tree.root]
