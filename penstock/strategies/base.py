"""The interface of strategies, their options, the registry of all, and the shortest of them: plain decoding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from penstock.config import Registry
from penstock.estimates.estimates import Estimates, Load
from penstock.tree import Node, TokenTree

# -------------------------------------------------------------------------------------------------------------- context
# The information that a strategy is given with every call.


@dataclass(frozen=True, slots=True)
class Context:
    """A snapshot that the loop makes for each round of calls. Strategies only read it."""

    now: float
    """Present time in seconds by the engine's clock, like all times."""
    draft_due: float
    """Time at which the drafter is expected to answer; infinite while it has not been asked."""
    load: Load
    estimates: Estimates
    oldest: int | None
    """Stream number of the batch that comes out next; None while nothing is in flight."""
    foretold: bool
    """Whether the drafter costs nothing, so that it is also asked where nothing drafted is sent."""
    redrafts: bool
    """Whether the drafter may know more about a node when it is asked about it again."""


# ----------------------------------------------------------------------------------------------------------------- base
# The interface of strategies: which nodes of a request's tree are drafted from, and which enter next.

NOW: Final = -math.inf
"""The value of ``ready_at`` where rows can enter now."""
ON_EVENT: Final = math.inf
"""The value of ``ready_at`` where nothing can enter until an event, a result or a draft, has happened."""


class Strategy(Protocol):
    """Decides for one request. Plain Python without a clock: the ``context`` of each call holds what it may know.

    The engine relies on two invariants: a parent never enters after its child, and a node enters once.
    """

    rate_limited: bool
    """Whether batches follow each other no faster than the slowest stage takes them. None then waits inside the
    pipeline, and each is composed as late as possible."""

    on_trial: bool
    """Whether the strategy decodes plainly while ``estimates.trials`` ask for it, so that they can measure it."""

    def sends_root_first(self, context: Context) -> bool:
        """Whether a new root enters alone and at once, before the drafter is asked."""
        ...

    @property
    def candidates(self) -> int:
        """Number of candidates wanted from the drafter for each node; 0 if the drafter is never asked."""
        ...

    def corrects(self, context: Context) -> bool:
        """Whether the drafter may correct its answers for nodes (``tree.corrected``)."""
        ...

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        """Nodes whose candidates are wanted now, parents first. They have not been asked for (``node.asked``), or are
        to be asked for again (``tree.redraft``)."""
        ...

    def holds_results(self, context: Context) -> bool:
        """Whether results that have come out are kept until a later one, and not handled now."""
        ...

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        """``NOW`` if ``enter`` would name any row, a later time at which to ask again, or ``ON_EVENT``.

        The engine asks again after every event, and at the returned time if there is none before. The call changes no
        row; the strategy may note how long it has waited.
        """
        ...

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        """Whether a tree whose root has entered has rows worth a place in a batch composed for other requests."""
        ...

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        """Grow the tree if necessary and return the rows that enter the next batch, parents first.

        Called when the first stage can take a batch. The prompt enters before any strategy is asked, and with it the
        first root, its last token.
        """
        ...


def now_if(ready: bool) -> float:
    """The value of ``ready_at`` where only an event can change the answer."""
    return NOW if ready else ON_EVENT


# -------------------------------------------------------------------------------------------------------------- options
# The options of a strategy that users may set, and how a strategy is made of them.


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
        """Upper limit of the nodes that enter together, or as one tree; 0 where nothing is drafted."""

    @property
    def most_asked(self) -> int:
        """Upper limit of the nodes that the drafter is asked about at a time."""
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


# ------------------------------------------------------------------------------------------------------------- registry
# All strategies by the name that users give. A new one is a file of the package and a line here.

STRATEGIES: Final[Registry[StrategyOptions]] = Registry(
    "penstock.strategies",
    {
        "auto": "auto:AutoOptions",
        "continuous": "auto:ContinuousOptions",
        "flowspec": "flowspec:FlowSpecOptions",
        "pipedec": "pipedec:PipeDecOptions",
        "static_tree": "pipedec:StaticTreeOptions",
        "autoregressive": "base:AutoregressiveOptions",
    },
)


# ---------------------------------------------------------------------------------------------------------------- plain
# Plain decoding, one token per round trip: the baseline, and the reference for exactness.


@dataclass(frozen=True)
class AutoregressiveOptions(StrategyOptions):
    """Plain decoding has no options."""

    drafts = False
    most_rows = 0

    def make(self, stages: int) -> Autoregressive:
        return Autoregressive()


class Autoregressive:
    """Plain decoding: a new root enters, and nothing else until its result is there."""

    candidates = 0

    rate_limited = False
    on_trial = False

    def sends_root_first(self, context: Context) -> bool:
        return True

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
