"""The options of a strategy that users may set, and how a strategy is made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from penstock.strategies.base import Strategy


@dataclass(frozen=True)
class StrategyOptions(ABC):
    """Base of the strategies' options: frozen dataclasses with a default for every field, the paper's where there is
    one.

    They raise FieldError for a value that cannot be used.
    """

    drafts: ClassVar[bool] = True
    """Whether the strategy drafts anything at all."""
    drafts_whole_trees: ClassVar[bool] = False
    """Whether several layers of a tree are drafted before the first of them is sent."""

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """Most nodes that enter together, or as one tree; 0 where nothing is drafted."""

    @property
    def most_asked(self) -> int:
        """Most nodes that the drafter is asked about at a time."""
        return self.most_rows

    @abstractmethod
    def make(self, stages: int) -> Strategy:
        """A new strategy for one request over ``stages`` stages."""


class WholeTreeOptions(StrategyOptions):
    """Base of options of strategies that draft several layers of a tree before they send the first."""

    drafts_whole_trees = True
    tree_size: int
    children: int

    @property
    def most_rows(self) -> int:
        return self.tree_size

    @property
    def most_asked(self) -> int:
        return self.children
