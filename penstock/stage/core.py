"""A stage as a state machine: batches in stream order, cancels beside them. Knows no transport, clock or torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.messages import MOST, Batch, Cancel, Candidates, Features, Opened, SampledToken, Sampling
from penstock.stage.cancels import Cancels
from penstock.stage.visibility import BatchView, ProtocolError, Visibility


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
        """What a learned drafter reads of the rows just computed [N, F]; ``hidden`` is what ``forward`` gave."""
        ...


class Reader(Protocol):
    """What the layers of a learned drafter also do: they read the features that the target's stages send."""

    def add_features(self, features: Features, states: Any) -> None:
        """Features have arrived; ``states`` [rows, width]."""
        ...

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """What has not arrived yet, as (node, layer), of the features of ``awaited``: (node, level)."""
        ...


class StageCore:
    """One stage: drops dead rows, computes the others, and says what the last stage has to say.

    ``process`` gives back the rows that survived and either their hidden states or, on the last stage, picks.
    """

    def __init__(
        self, layers: Layers, capacity: int, is_last: bool, taps: Sequence[int] = (), vocab_size: int = MOST
    ) -> None:
        self.layers = layers
        self.taps = list(taps)
        """Layers whose states go to a drafter."""
        self.reader: Reader | None = None
        """The layers again, where they are a learned drafter's."""
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
        """Features have arrived from a stage of the target. Raises ProtocolError where nobody reads any."""
        if self.reader is None:
            raise ProtocolError("features arrived at a stage that reads none")
        self.reader.add_features(features, states)

    def tapped(self) -> tuple[Features, Any] | None:
        """What the drafter is to be told of the batch that has just been processed."""
        tapped, self._tapped = self._tapped, None
        return tapped

    def process(self, batch: Batch, hidden: Any) -> tuple[list[int], Any, list[SampledToken], list[Candidates]]:
        """Compute one batch.

        ``hidden`` [len(batch.alive), D] belongs to the rows in ``batch.alive`` (None on the first stage). Returns the
        surviving rows (indices into the batch's rows), their hidden states, picks and candidates. Raises
        ProtocolError when the batch does not follow the last one. The first one may have any number: a stage may take
        another's place.
        """
        if self._begun and batch.stream != self._cancels.next_stream:
            raise ProtocolError(f"batch {batch.stream} arrived where {self._cancels.next_stream} was due")
        self._begun = True
        for request in batch.closed:
            self._samplings.pop(request, None)
        for opened in batch.opened:
            check_tokens(opened, self._vocab_size)
            self._samplings[opened.request] = opened.sampling
        self.visibility.apply_header(batch)
        rows = self._cancels.surviving(batch)
        self._cancels.passed(batch.stream)
        if not rows:
            return rows, None, [], []
        view = self.visibility.view(batch, rows)
        if hidden is not None and len(rows) < len(batch.alive):
            kept = set(rows)
            hidden = hidden[[i for i, row in enumerate(batch.alive) if row in kept]]
        hidden = self.layers.forward(view, hidden)
        if self.taps:
            features = Features(layers=self.taps, nodes=view.nodes.tolist(), slots=view.slots.tolist())
            self._tapped = features, self.layers.features(hidden)
        if not self.is_last:
            return rows, hidden, [], []
        place = {row: i for i, row in enumerate(rows)}
        wanted = [place[row] for row in batch.wanted if row in place]
        samplings = [self._samplings[int(view.requests[i])] for i in wanted]
        if not wanted:
            return rows, None, [], []
        if batch.candidates:
            return rows, None, [], self.layers.candidates(view, hidden, wanted, samplings, batch.candidates)
        return rows, None, self.layers.pick(view, hidden, wanted, samplings), []


def check_tokens(opened: Opened, vocab_size: int) -> None:
    """Raise ProtocolError unless the model has the tokens that a request's sampling names.

    ``barred`` ones, which may be any that a client calls its stop tokens, need not exist.
    """
    sampling = opened.sampling
    named = max((*sampling.allowed_token_ids, *(token for token, _ in sampling.logit_bias)), default=-1)
    if named >= vocab_size:
        raise ProtocolError(f"request {opened.request} names token {named}; the model's are 0 to {vocab_size - 1}")
