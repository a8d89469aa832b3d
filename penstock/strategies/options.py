"""What a strategy's file declares beside it: the options that users may set, and how it is made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from penstock.strategies.base import Strategy


@dataclass(frozen=True)
class StrategyOptions(ABC):
    """Subclasses are frozen dataclasses, every field with a default: the paper's where the strategy is a paper's.

    They raise FieldError for a value that cannot be used.
    """

    drafts: ClassVar[bool] = True
    """Whether anything is drafted at all."""
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
        """A fresh strategy for one request over so many stages."""


class WholeTreeOptions(StrategyOptions):
    """Of a strategy that drafts several layers of a tree before it sends the first of them."""

    drafts_whole_trees = True
    tree_size: int
    children: int

    @property
    def most_rows(self) -> int:
        return self.tree_size

    @property
    def most_asked(self) -> int:
        return self.children
