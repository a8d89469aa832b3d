"""Strategies by name."""

from __future__ import annotations

from penstock.config import SpeculativeConfig
from penstock.strategies.autoregressive import Autoregressive
from penstock.strategies.base import Strategy
from penstock.strategies.pipedec import PipeDec
from penstock.strategies.static_tree import StaticTree


def make_strategy(config: SpeculativeConfig | None, stages: int) -> Strategy:
    """A fresh strategy for one request over so many stages; plain decoding where nothing speculates."""
    if config is None or config.strategy == "autoregressive":
        return Autoregressive()
    if config.strategy == "pipedec":
        return PipeDec(stages, config.width, config.children)
    return StaticTree(config.tree_size, config.tree_depth, config.children)
