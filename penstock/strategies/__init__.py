"""Strategies by name."""

from __future__ import annotations

from penstock.config import STRATEGY_OPTIONS, SpeculativeConfig
from penstock.strategies.auto import Auto
from penstock.strategies.autoregressive import Autoregressive
from penstock.strategies.base import Strategy
from penstock.strategies.continuous import Continuous
from penstock.strategies.flowspec import FlowSpec
from penstock.strategies.pipedec import PipeDec
from penstock.strategies.static_tree import StaticTree


def make_strategy(config: SpeculativeConfig | None, stages: int) -> Strategy:
    """A fresh strategy for one request over so many stages; plain decoding where nothing speculates."""
    if config is None or config.strategy == "autoregressive":
        return Autoregressive()
    options = {option: getattr(config, option) for option in STRATEGY_OPTIONS[config.strategy]}
    if config.strategy == "auto":
        return Auto(**options)
    if config.strategy == "continuous":
        return Continuous(**options)
    if config.strategy == "flowspec":
        return FlowSpec(stages, **options)
    if config.strategy == "pipedec":
        return PipeDec(stages, **options)
    return StaticTree(**options)
