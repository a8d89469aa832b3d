"""The drafter of block modules, which draft several levels below a node in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from penstock.config import check_positive
from penstock.drafters.base import Draft, DrafterParts, DraftRequest
from penstock.drafters.learned import LearnedDrafter, LearnedOptions
from penstock.drafters.small_model import Entries
from penstock.messages import CONTEXT, KEPT, PATH, Batch, Candidates
from penstock.pipeline.base import Pipeline
from penstock.requests.request import Request
from penstock.tree import Node

if TYPE_CHECKING:
    from penstock.models.speculators.block import BlockShape
    from penstock.models.speculators.block_format import BlockCheckpoint


@dataclass(frozen=True, kw_only=True)
class BlockOptions(LearnedOptions):
    ahead: int | None = None
    """Levels below the candidates of a node that the same pass drafts, without knowing which candidate is right; 0: a
    pass for every node. None: as many as the module's block has."""

    def __post_init__(self) -> None:
        check_positive(self, "ahead", or_zero=True)

    def start(self, parts: DrafterParts) -> BlockDrafter:
        shape = cast("BlockCheckpoint", parts.speculator).shape
        return BlockDrafter(parts.start_weights(), parts.chunk, shape, self.ahead)


Level = Sequence[tuple[int, float]]
"""Candidates for any node at some distance below one that was asked about."""


class Computed:
    """The nodes for which blocks have been computed, and how many levels below each its block reaches."""

    def __init__(self) -> None:
        self._by_request: dict[int, dict[int, tuple[Node, int, list[Level]]]] = {}
        """(node, levels, the levels themselves where they are known without their nodes), by request and node."""

    def above(self, request: Request, node: Node) -> tuple[list[Level], int]:
        """The levels that were drafted with a node above, and how far above it is; 0 where a pass has to answer.

        That is so for a node that has entered or is asked about again: a block that shows it knows more.
        """
        drafted = self._by_request.get(request.number)
        above, distance = node.parent, 1
        if node.entered or node.candidates is not None or not drafted:
            return [], 0
        while above is not None and above.id not in drafted:
            above, distance = above.parent, distance + 1
        _, reach, levels = drafted[above.id] if above is not None else (node, 0, [])
        return (levels, distance) if distance <= reach else ([], 0)

    def keep(self, request: int, node: Node, reach: int, levels: list[Level]) -> None:
        """Keep what comes below a node, and drop what is kept of nodes that have left the tree."""
        known = self._by_request.get(request, {})
        kept = {i: entry for i, entry in known.items() if entry[0].open}
        self._by_request[request] = kept | {node.id: (node, reach, levels)}

    def forget(self, request: Request) -> None:
        self._by_request.pop(request.number, None)


class BlockDrafter(LearnedDrafter):
    """Asks a block module, and answers for nodes further below from what one pass has said.

    Committed tokens before the root give context by their own states, which have left the last stage with the result
    that made the root, so that no pass waits for more. A node that has entered, or is asked about again, gets a pass
    of its own, in which the tokens from the root down to it are shown. One that has not entered is answered from the
    levels that a pass for a node above it has drafted, if they reach it: that costs no message, or with a Markov head
    one row, since the node's own token has its say.
    """

    def __init__(self, pipeline: Pipeline, chunk: int, shape: BlockShape, ahead: int | None = None) -> None:
        super().__init__(pipeline, chunk)
        self._shape: Final = shape
        self._ahead = shape.ahead if ahead is None else min(ahead, shape.ahead)
        self._levels: dict[int, int] = {}
        """The level of each row that has yet to be sent, by node."""
        self._computed = Computed()
        self._blocks: dict[int, tuple[int, int]] = {}
        """The request of each node that a block is being computed for, and how many levels below it that reaches."""

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        """Begin a round. Returns its rows, those of the blocks included."""
        self._levels.clear()
        self._blocks.clear()
        left = []
        for ask in asks:
            nodes = []
            for node in ask.nodes:
                levels, distance = self._computed.above(ask.request, node)
                if levels:
                    self._drafts.append(Draft(node, levels[distance - 1][: ask.count]))
                    continue
                nodes.append(node)
                if distance:
                    self._levels[node.id] = KEPT
                else:
                    shown = node.position - ask.request.tree.root.position + 1
                    self._blocks[node.id] = ask.request.number, min(self._ahead, self._shape.reach(shown))
            if nodes:
                left.append(replace(ask, nodes=nodes))
        return super().ask(left) + len(self._blocks) * (self._shape.size - 1)

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._computed.forget(request)
        self._blocks = {node: entry for node, entry in self._blocks.items() if entry[0] != request.number}

    def _rows(self, ask: DraftRequest) -> list[Node]:
        request, root = ask.request, ask.request.tree.root
        context = self._finalize(request, len(request.committed) - 1)
        again = [node for node in ask.nodes if self._builder.has(request, node)]
        # What is committed has been finalized, for this request or for another one that shares its block.
        path = [node for node in self._builder.missing(request, ask.nodes) if node.position >= root.position]
        self._again.update(node.id for node in [*context, *again] if self._builder.has(request, node))
        self._levels.update((node.id, CONTEXT) for node in context)
        return [*context, *path, *again]

    def _batch(self, entries: Entries, count: int) -> Batch:
        batch = super()._batch(entries, count)
        batch.ahead = 0 if self._shape.markov else self._ahead
        batch.feature_levels = [self._levels.pop(node, PATH) for node in batch.rows.nodes]
        batch.feature_nodes = [
            node if level == CONTEXT else 0 for node, level in zip(batch.rows.nodes, batch.feature_levels, strict=True)
        ]
        return batch

    def _take(self, answers: Sequence[Candidates]) -> None:
        below: dict[int, list[Level]] = {}
        for answer in answers:
            if answer.level > 0:
                below.setdefault(answer.node, []).append(list(zip(answer.tokens, answer.scores, strict=True)))
        own = [answer for answer in answers if answer.level == 0]
        for answer in own:
            self._keep(answer.node, below.get(answer.node, []))
        super()._take(own)

    def _keep(self, node: int, levels: list[Level]) -> None:
        """Keep what a block says further below the node that it was computed for."""
        if node in self._blocks:
            request, reach = self._blocks[node]
            self._computed.keep(request, self._asked[node], reach if self._shape.markov else len(levels), levels)
