"""A stage's state: which rows it has, which are dead, and which slots are in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.messages import MOST, Batch, Cancel, Candidates, Features, Opened, SampledToken, Sampling
from penstock.stage.linked import Leader
from penstock.stage.visibility import BatchView, FeaturesError, ProtocolError, Visibility

# -------------------------------------------------------------------------------------------------------------- cancels
# The dead nodes that cancels have announced to a stage beside the stream of batches.


class Cancels:
    """Dead nodes, each remembered until the stream number that its cancel precedes has passed.

    A cancel may come late, early or twice. A late one concerns batches that have passed, and is not kept.
    """

    def __init__(self) -> None:
        self.next_stream = 0
        self._known: list[tuple[int, frozenset[int]]] = []

    def add(self, message: Cancel) -> None:
        if message.before > self.next_stream:
            self._known.append((message.before, frozenset(message.nodes)))

    def surviving(self, batch: Batch) -> list[int]:
        """Indices of the batch's rows that are still to be computed."""
        if not self._known:
            return batch.alive
        nodes, alive = batch.rows.nodes, batch.alive
        for _, dead in self._known:
            alive = [row for row in alive if nodes[row] not in dead]
        return alive

    def awaited(self, batch: Batch) -> set[tuple[int, int]]:
        """(node, level) of the features that the batch's surviving rows need.

        The level is 0 where the batch names none.
        """
        if not batch.feature_nodes:
            return set()
        rows = (row for row in self.surviving(batch) if batch.feature_nodes[row])
        return {(batch.feature_nodes[row], batch.feature_levels[row] if batch.feature_levels else 0) for row in rows}

    def passed(self, stream: int) -> None:
        """The batch with this number has been computed: forget the cancels that only it and earlier ones needed."""
        self.next_stream = stream + 1
        if self._known:
            self._known = [(before, nodes) for before, nodes in self._known if before > self.next_stream]


# ----------------------------------------------------------------------------------------------------------------- core
# A stage as a state machine: batches in stream order, cancels beside them. Knows no transport, clock or torch.


class Layers(Protocol):
    """The layers of one stage. The torch implementation is ``models.stage_model.StageModel``.

    ``hidden`` is what the previous stage returned for the surviving rows ([N, D], None on the first stage).
    """

    def forward(self, view: BatchView, hidden: Any) -> Any:
        """Compute the rows and store their K and V; returns the hidden states [N, D] that go to the next stage."""
        ...

    def pick(
        self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[SampledToken]:
        """Last stage: the target's next token after each row in ``wanted`` (indices into the view)."""
        ...

    def candidates(
        self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """Last stage of a drafter: ``count`` noise-ranked candidates after each row in ``wanted``."""
        ...

    def features(self, hidden: Any) -> Any:
        """The features [N, F] of the rows just computed, for a learned drafter. ``hidden`` comes from ``forward``."""
        ...


class Reader(Protocol):
    """The further interface of a learned drafter's layers, which read features that the target's stages send."""

    def add_features(self, features: Features, states: Any) -> None:
        """Take in features that have arrived; ``states`` [rows, width] are their values."""
        ...

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """The features missing for ``awaited``, given as (node, level), each as (node, layer)."""
        ...


class StageCore:
    """One stage: drops dead rows and computes the others; the last stage also picks tokens or ranks candidates."""

    def __init__(
        self, layers: Layers, capacity: int, is_last: bool, taps: Sequence[int] = (), vocab_size: int = MOST
    ) -> None:
        self.layers = layers
        self.taps = list(taps)
        """Layers whose hidden states go to a learned drafter."""
        self.reader: Reader | None = None
        """``layers`` once more if they are a learned drafter's, else None."""
        self.leader: Leader | None = None
        """The stage's other ranks, if it has any."""
        self.visibility = Visibility(capacity, vocab_size)
        self._vocab_size = vocab_size
        self.is_last = is_last
        self._cancels = Cancels()
        self._begun = False
        self._samplings: dict[int, Sampling] = {}
        self._tapped: tuple[Features, Any] | None = None

    def cancel(self, message: Cancel) -> None:
        """Remember the dead nodes until the stream number they precede has passed."""
        self._cancels.add(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        """The features, as (node, layer), that have to arrive before the batch can be computed."""
        awaited = self._cancels.awaited(batch)
        return self.reader.missing_features(awaited) if awaited and self.reader else set()

    def add_features(self, features: Features, states: Any) -> None:
        """Features have arrived from a stage of the target. Raises FeaturesError where nobody reads any."""
        if self.reader is None:
            raise FeaturesError("features arrived at a stage that reads none")
        self.reader.add_features(features, states)

    def tapped(self) -> tuple[Features, Any] | None:
        """The features of the batch that was processed last, for the drafter; None if there are none.

        Asking clears them.
        """
        tapped, self._tapped = self._tapped, None
        return tapped

    def process(self, batch: Batch, hidden: Any) -> tuple[list[int], Any, list[SampledToken], list[Candidates]]:
        """Compute one batch.

        ``hidden`` [len(batch.alive), D] belongs to the rows in ``batch.alive`` (None on the first stage). Returns the
        surviving rows (indices into the batch's rows), their hidden states, picks and candidates. Raises
        ProtocolError when the batch does not follow the last one. The first one may have any number: a stage may take
        another's place.
        """
        # The first batch of a stage that replaces a lost one may have any number.
        if self._begun and batch.stream != self._cancels.next_stream:
            raise ProtocolError(f"batch {batch.stream} arrived where {self._cancels.next_stream} was due")
        self._begun = True
        for request in batch.closed:
            self._samplings.pop(request, None)
        for opened in batch.opened:
            check_tokens(opened, self._vocab_size)
            self._samplings[opened.request] = opened.sampling
        self._check_wanted(batch)
        # The header counts also where no row survives: what it commits, opens and closes is never said again.
        self.visibility.apply_header(batch)
        rows = self._cancels.surviving(batch)
        self._cancels.passed(batch.stream)
        if self.leader is not None:
            asked = len(set(batch.wanted).intersection(rows)) if self.is_last else 0
            self.leader.step(batch, rows, asked)
        if not rows:
            return rows, None, [], []
        view = self.visibility.view(batch, rows)
        if hidden is not None and len(rows) < len(batch.alive):
            kept = set(rows)
            # The stages before dropped rows too, so ``hidden`` holds only ``batch.alive``:
            #   rows of the batch   0 1 2 3 4
            #   batch.alive         0 . 2 3 .     hidden has 3 rows
            #   surviving           0 . . 3 .     keep hidden[0], hidden[2]
            hidden = hidden[[i for i, row in enumerate(batch.alive) if row in kept]]
        hidden = self.layers.forward(view, hidden)
        if self.taps:
            features = Features(layers=self.taps, nodes=view.nodes.tolist(), slots=view.slots.tolist())
            self._tapped = features, self.layers.features(hidden)
        if not self.is_last:
            return rows, hidden, [], []
        # ``wanted`` counts within the batch, the layers within the surviving rows.
        place = {row: i for i, row in enumerate(rows)}
        wanted = [place[row] for row in batch.wanted if row in place]
        samplings = [self._samplings[int(view.requests[i])] for i in wanted]
        if not wanted:
            return rows, None, [], []
        if batch.candidates:
            return rows, None, [], self.layers.candidates(view, hidden, wanted, samplings, batch.candidates)
        return rows, None, self.layers.pick(view, hidden, wanted, samplings), []

    def _check_wanted(self, batch: Batch) -> None:
        """Raise ProtocolError if a row's next token is wanted, but not how to pick it.

        Only the last stage picks, but each one checks: the first honest one tells who has sent it.
        """
        for row in batch.wanted:
            if batch.rows.requests[row] not in self._samplings:
                raise ProtocolError(f"stream {batch.stream}: request {batch.rows.requests[row]} is not open")


def check_tokens(opened: Opened, vocab_size: int) -> None:
    """Raise ProtocolError unless the model has every token that a request's sampling names.

    The tokens in ``barred`` need not exist: they may be any that a client calls its stop tokens.
    """
    sampling = opened.sampling
    named = max((*sampling.allowed_token_ids, *(token for token, _ in sampling.logit_bias)), default=-1)
    if named >= vocab_size:
        raise ProtocolError(f"request {opened.request} names token {named}; the model's are 0 to {vocab_size - 1}")
