"""All strategies by the name that users give. A new one is a file of the package and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.registry import Registry

if TYPE_CHECKING:
    from penstock.strategies.options import StrategyOptions

STRATEGIES: Final[Registry[StrategyOptions]] = Registry(
    "penstock.strategies",
    {
        "auto": "auto:AutoOptions",
        "continuous": "continuous:ContinuousOptions",
        "flowspec": "flowspec:FlowSpecOptions",
        "pipedec": "pipedec:PipeDecOptions",
        "static_tree": "static_tree:StaticTreeOptions",
        "autoregressive": "autoregressive:AutoregressiveOptions",
    },
)
