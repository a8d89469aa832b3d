"""SPD's drafter: how deep each token is in the pipeline, and the module over its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from penstock.config import FieldError, check_positive
from penstock.drafters.base import Draft, DrafterParts, DraftRequest
from penstock.drafters.learned import Entries, LearnedDrafter, LearnedOptions
from penstock.messages import Batch
from penstock.pipeline.base import Pipeline
from penstock.requests.request import Request
from penstock.tree import Node

if TYPE_CHECKING:
    from penstock.models.speculators.base import SpeculatorCheckpoint
    from penstock.models.speculators.spd import SpdCheckpoint


# --------------------------------------------------------------------------------------------------------------- depths
# How far a token has got in the target's pipeline, and hence the level at which SPD's module sees it.
#
# Source: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3.7 and appendix A; the anchors are
# those of yuyijiong/speculative_pipeline_decoding.


@dataclass(frozen=True)
class Depths:
    """Maps the number of stages that a token has passed to the level at which the module reads it.

    ``levels`` [stages + 1]: the level by number of stages. ``reading``: the levels that read states of the target at
    all. A token's depth is computed as if a batch entered every step and left its stage at the end of it, so that it
    does not depend on when anything arrives (SPD, Eq. 2 and 3). ``lag``: steps subtracted to leave time for the
    transfer of features. ``asked``: the depth of a token that is just entering; 1 where the module looks at it once it
    has passed a stage (SPD, section 4.4). ``memory``: the module can be asked about such tokens alone, so that any node
    asked about is computed as one of them.
    """

    levels: Sequence[int]
    reading: frozenset[int]
    lag: int = 0
    asked: int = 0
    memory: bool = False

    def level(self, steps: int) -> int:
        """The level of a token that entered ``steps`` batches ago."""
        return self.levels[min(max(steps - self.lag, 0) + self.asked, len(self.levels) - 1)]

    @property
    def last(self) -> int:
        """The level of a token that has passed all stages."""
        return self.levels[-1]


def levels_after(layers: Sequence[tuple[int, int]], levels: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The level of a token after 0, 1, ... stages: the deepest that needs no state further on, or else the first.

    ``layers`` are each stage's [first, last). ``levels`` are the target's hidden states that each level reads, numbered
    as in ``SpeculatorCheckpoint``: the last number is one more than there are layers, the state before the final norm.
    The last stage provides both the state after the norm and the one before it.
    """
    needed = [min(max(reads), layers[-1][1]) for reads in levels]
    return tuple(max((i for i, state in enumerate(needed) if state <= done), default=0) for done in layers_done(layers))


def layers_done(layers: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Number of layers behind a token after 0, 1, ... of the stages with ``layers`` [first, last).

    Only the last stage provides the states after the final norm, even where it has no layer.
    """
    total = layers[-1][1]
    return (0, *(min(last, total - 1) for _, last in layers[:-1]), total)


# ------------------------------------------------------------------------------------------------------------------ spd
# SPD's drafter, and early exit: each row needs its own token's feature, as deep as the token has got by then.


@dataclass(frozen=True, kw_only=True)
class SpdOptions(LearnedOptions):
    """Options of ``spd`` (Wang et al., Speculative Pipeline Decoding, section 3).

    Raises FieldError for a negative lag, and at the start for a module that was trained for other stages.
    """

    feature_lag: int = 0
    """Number of batches by which every token is taken to be less deep in the pipeline than it is, so that drafting
    waits for no feature."""
    post_state: bool = False
    """Whether a token has to have passed the first stage before the module looks at it (SPD, section 4.4)."""

    def __post_init__(self) -> None:
        check_positive(self, "feature_lag", or_zero=True)

    @property
    def needs_entered(self) -> str | None:
        return "post_state" if self.post_state else None

    def check_speculator(self, speculator: SpeculatorCheckpoint, layers: Sequence[tuple[int, int]]) -> None:
        check_stages(cast("SpdCheckpoint", speculator), layers, self.post_state)

    def start(self, parts: DrafterParts) -> SpdDrafter:
        return SpdDrafter(parts.start_weights(), parts.chunk, depths(parts, self.feature_lag, self.post_state))


@dataclass(frozen=True, kw_only=True)
class EarlyExitOptions(LearnedOptions):
    """Options of ``early_exit``: a layer and a head on what the first stage gives, as in PPSD."""

    @property
    def needs_entered(self) -> str | None:
        return "method 'early_exit'"

    def check_speculator(self, speculator: SpeculatorCheckpoint, layers: Sequence[tuple[int, int]]) -> None:
        check_stages(cast("SpdCheckpoint", speculator), layers, post_state=False)

    def start(self, parts: DrafterParts) -> SpdDrafter:
        return SpdDrafter(parts.start_weights(), parts.chunk, depths(parts))


def check_stages(speculator: SpdCheckpoint, layers: Sequence[tuple[int, int]], post_state: bool) -> None:
    """Raise FieldError where SPD's module was trained for a pipeline with other stages or layers."""
    if speculator.stages is None:
        return
    model = f"{str(speculator.path)!r}"
    if speculator.stages != len(layers):
        raise FieldError(
            "speculative_config.model",
            f"is {model}, a module for {speculator.stages} stages, and there are {len(layers)}: "
            f"set pipeline_parallel_size to {speculator.stages}, or train one with anchors",
        )
    for depth, (_, last) in enumerate(layers[:-1], 1):
        deepest = max(speculator.levels[depth])
        if deepest > last:
            raise FieldError(
                "speculative_config.model",
                f"is {model}, which reads state {deepest} of tokens that have passed {depth} stages, but these end "
                f"with layer {last}: set layer_split so that they hold {deepest} layers",
            )
    if post_state != bool(speculator.asking):
        raise FieldError(
            "speculative_config.post_state",
            f"is {post_state}; the module {model} was trained for {bool(speculator.asking)}",
        )


def depths(parts: DrafterParts, lag: int = 0, post_state: bool = False) -> Depths:
    """The levels at which the module sees tokens in flight; one trained for a fixed number of stages
    has one per depth."""
    speculator = cast("SpdCheckpoint", parts.speculator)
    memory = speculator.stages is not None
    return Depths(
        range(len(parts.layers) + 1) if memory else levels_after(parts.layers, speculator.levels),
        frozenset(i for i, reads in enumerate(speculator.levels) if any(reads)),
        lag,
        speculator.asking if memory else int(post_state),
        memory,
    )


class SpdDrafter(LearnedDrafter):
    """A drafter that recomputes, before it answers, every token above the asked one whose level has changed.

    Committed tokens, except for the root, have come out of the last stage, or do so during prefill. They are computed
    once, at the last level, and their keys and values stay. Tokens in flight are recomputed from step to step (SPD,
    section 3.5); where a strategy wants corrections, it is given the module's new candidates for them.
    """

    def __init__(self, pipeline: Pipeline, chunk: int, depths: Depths) -> None:
        super().__init__(pipeline, chunk)
        self._depths = depths
        self._computed: dict[int, dict[int, tuple[Node, int]]] = {}
        """Node and level at which it was last computed, by request and node, for tokens in flight."""
        self._levels: dict[int, int] = {}
        """The level at which each row that has yet to be sent will be computed, by node."""

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._computed.pop(request.number, None)

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        """Begin a round. A node that needs a feature and has not entered is answered with None."""
        self._levels.clear()
        possible = []
        for ask in asks:
            # A node that has not entered is at level 0. Where that level reads states, the target has none of it, and a
            # row that waited for them would hold up the round.
            nodes = [node for node in ask.nodes if node.entered or self._depths.level(0) not in self._depths.reading]
            taken = {node.id for node in nodes}
            self._drafts += [Draft(node, None) for node in ask.nodes if node.id not in taken]
            if nodes:
                possible.append(replace(ask, nodes=nodes))
        return super().ask(possible)

    def _rows(self, ask: DraftRequest) -> list[Node]:
        request = ask.request
        rows = [(node, self._depths.last) for node in self._finalize(request, len(request.committed) - 1)]
        # Committed ones first: all other rows attend to them.
        rows += self._above(ask)
        for node, level in rows:
            self._levels[node.id] = level
            if self._builder.has(request, node):
                self._again.add(node.id)
                if ask.corrects and not self._depths.memory and node.position >= request.tree.root.position:
                    self._asked[node.id] = node
        return [node for node, _ in rows]

    def _above(self, ask: DraftRequest) -> list[tuple[Node, int]]:
        """The nodes asked about, and all above them whose level has changed since they were computed; parents first."""
        computed = self._living(ask.request)
        asked = {node.id for node in ask.nodes}
        found: dict[int, tuple[Node, int]] = {}
        seen: set[int] = set()
        for node in ask.nodes:
            path = []
            current: Node | None = node
            while current is not None and current.id not in seen:
                seen.add(current.id)
                level = self._level(ask, current, current.id in asked)
                if current.id in asked or computed.get(current.id, (current, -1))[1] != level:
                    path.append((current, level))
                current = current.parent
            # The path was walked upwards; parents have to be computed first.
            found.update((one.id, (one, level)) for one, level in reversed(path))
        computed.update(found)
        return list(found.values())

    def _level(self, ask: DraftRequest, node: Node, asked: bool) -> int:
        new = not node.entered or (asked and self._depths.memory)
        return self._depths.level(0 if new else ask.stream - node.stream)

    def _living(self, request: Request) -> dict[int, tuple[Node, int]]:
        """The computed nodes of the request's tree, without those that have died or are final."""
        root = request.tree.root
        known = self._computed.get(request.number, {})
        living = {i: entry for i, entry in known.items() if entry[0].alive and entry[0].position >= root.position}
        self._computed[request.number] = living
        return living

    def _batch(self, entries: Entries, count: int) -> Batch:
        batch = super()._batch(entries, count)
        batch.feature_levels = [self._levels.pop(node) for node in batch.rows.nodes]
        reading = self._depths.reading
        batch.feature_nodes = [
            node if level in reading else 0 for node, level in zip(batch.rows.nodes, batch.feature_levels, strict=True)
        ]
        return batch
