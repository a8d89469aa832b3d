"""The hash model: a row's KV is a hash of its input, its output a hash of the KV it sees in position order.

Whatever a row wrongly sees or fails to see changes every token after it, so bugs of visibility, slot reuse and order
show within milliseconds, without torch. A pick is of the row's path too, as penalties and grammars read it.

The second of every three stages carries a state in place of keys and values, as ``models/recurrent`` does: a row's
state is a hash of its parent's and of what the row adds. What is certain is folded into one state per request, and is
not read again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from penstock.messages import CONTEXT, KEPT, Candidates, Features, SampledToken, Sampling
from penstock.models.speculators.block import BlockShape
from penstock.stage.visibility import BatchView, RequestView, Visibility


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


FOLD = 4
"""Committed rows are folded in blocks of this many."""


def carries_state(stage: int) -> bool:
    return stage % 3 == 1


def stepped(state: int, added: Iterable[int]) -> int:
    """Return the state after rows that add these values, one after another."""
    for one in added:
        state = digest("state", state, one)
    return state


def committed_slots(visibility: Visibility) -> dict[int, list[int]]:
    """Return, for each request that is open on a stage, the slots known to be committed, in position order."""
    return {number: list(slots.committed) for number, slots in visibility._requests.items()}


class HashLayers:
    """``Layers`` of one stage. ``log`` records (node, positions seen) for the tests."""

    def __init__(self, stage: int, capacity: int, vocabulary: int) -> None:
        self.stage = stage
        self.vocabulary = vocabulary
        self.kv: list[int] = [0] * capacity
        """The row's key and value by slot; on a stage that carries a state, what the row adds to that state."""
        self.rows_computed = 0
        self._folded: dict[int, tuple[int, int]] = {}
        """For each request with rows here: the position up to which committed rows are folded, and the state there."""

    def forward(self, view: BatchView, hidden: list[int] | None) -> HiddenRows:
        inputs = view.tokens.tolist() if hidden is None else hidden
        self.rows_computed += len(view)
        for request in view.closed:
            self._folded.pop(request, None)
        for i, slot in enumerate(view.slots.tolist()):
            self.kv[slot] = digest("kv", self.stage, inputs[i])
        out: list[int] = [0] * len(view)
        for seen in view.views:
            for line, row in enumerate(seen.rows.tolist()):
                visible = sorted((int(seen.positions[c]), int(seen.slots[c])) for c in seen.mask[line].nonzero()[0])
                positions = [position for position, _ in visible]
                assert positions == list(range(int(view.positions[row]) + 1)), "a row sees each position once"
                slots = [slot for _, slot in visible]
                out[row] = digest("out", self.stage, self._seen(seen, slots))
        return HiddenRows(out)

    def _seen(self, seen: RequestView, slots: Sequence[int]) -> list[int] | int:
        """Return what a row computes with whose path is in ``slots``: their KV, or the state that follows from them."""
        if not carries_state(self.stage):
            return [self.kv[slot] for slot in slots]
        base = min(seen.committed, len(slots) - 1) // FOLD * FOLD
        until, state = self._folded.get(seen.request, (0, 0))
        if until > base:  # a row is computed anew
            until = state = 0
        self._folded[seen.request] = base, stepped(state, (self.kv[slot] for slot in slots[until:base]))
        return stepped(self._folded[seen.request][1], (self.kv[slot] for slot in slots[base:]))

    def features(self, hidden: HiddenRows) -> HiddenRows:
        """The state that leaves this stage, for a learned drafter."""
        return hidden

    def pick(
        self, view: BatchView, hidden: list[int], wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[SampledToken]:
        return [
            SampledToken(
                int(view.nodes[i]),
                digest("token", sampling.seed, hidden[i], view.path(i).tolist()) % self.vocabulary,
            )
            for i, sampling in zip(wanted, samplings, strict=True)
        ]

    def candidates(
        self, view: BatchView, hidden: list[int], wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        answers = []
        for i in wanted:
            ranked = sorted(range(self.vocabulary), key=lambda token: digest("rank", hidden[i], token))[:count]
            answers.append(Candidates(int(view.nodes[i]), ranked, [-0.5 * (k + 1) for k in range(len(ranked))]))
        return answers


class HashLearned(HashLayers):
    """A learned drafter: it keeps the features that come."""

    def __init__(self, capacity: int, vocabulary: int, reads: Sequence[int] = ()) -> None:
        """``reads`` are the stages whose outputs it reads."""
        super().__init__(0, capacity, vocabulary)
        self.reads = reads
        self.known: dict[tuple[int, int], int] = {}

    def add_features(self, features: Features, states: HiddenRows) -> None:
        (layer,) = features.layers
        self.known.update(((node, layer), state) for node, state in zip(features.nodes, states, strict=True))

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        return {(node, layer) for node, level in awaited for layer in self._reads(level)} - self.known.keys()

    def _reads(self, level: int) -> Sequence[int]:
        return self.reads


class HashReader(HashLearned):
    """A learned drafter: a row's KV is a hash of its token and of its parent's features, or of its own output there."""

    def __init__(self, capacity: int, vocabulary: int, reads: Sequence[int], needs_all: bool = False) -> None:
        """With ``needs_all`` it says nothing of a row whose parent's features have not come."""
        super().__init__(capacity, vocabulary, reads)
        self.needs_all = needs_all
        self.read: dict[int, bool] = {}
        """For each node whose row has entered: whether its parent's features were there when it last did so."""
        self._node_at: dict[int, int] = {}
        self._own: dict[int, int] = {}

    def forward(self, view: BatchView, hidden: None) -> HiddenRows:
        out: list[int] = [0] * len(view)
        sees = {row: (seen, line) for seen in view.views for line, row in enumerate(seen.rows.tolist())}
        for row, (slot, parent, node) in enumerate(zip(*map(np.ndarray.tolist, columns(view)), strict=True)):
            self._node_at[slot] = node
            above = self._node_at.get(parent, 0)
            states = [self.known.get((above, layer)) for layer in self.reads]
            self.read[node] = None not in states
            feature = states if self.read[node] else self._own.get(above)
            assert parent < 0 or feature is not None, "a row has its parent's features, or follows it"
            self.kv[slot] = digest("kv", int(view.tokens[row]), feature)
            seen, line = sees[row]
            visible = sorted((int(seen.positions[c]), int(seen.slots[c])) for c in seen.mask[line].nonzero()[0])
            assert [position for position, _ in visible] == list(range(int(view.positions[row]) + 1))
            out[row] = self._own[node] = digest("out", [self.kv[slot] for _, slot in visible])
        return HiddenRows(out)

    def candidates(
        self, view: BatchView, hidden: list[int], wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        kept = [i for i in wanted if self.read[int(view.nodes[i])] or not self.needs_all]
        return super().candidates(view, hidden, kept, samplings, count)


class HashSpd(HashLearned):
    """SPD's module: a row's KV is a hash of its token and of the states that its level reads, its own."""

    def __init__(self, capacity: int, vocabulary: int, levels: Sequence[Sequence[int]]) -> None:
        """``levels`` are the stages whose outputs each level reads."""
        super().__init__(capacity, vocabulary)
        self.levels = levels

    def _reads(self, level: int) -> Sequence[int]:
        return self.levels[level]

    def forward(self, view: BatchView, hidden: None) -> HiddenRows:
        assert view.levels is not None
        sees = {row: (seen, line) for seen in view.views for line, row in enumerate(seen.rows.tolist())}
        out: list[int] = [0] * len(view)
        for row, (node, slot, level) in enumerate(zip(view.nodes, view.slots, view.levels, strict=True)):
            states = [self.known[int(node), layer] for layer in self.levels[level]]
            self.kv[slot] = digest("kv", int(view.tokens[row]), states)
        for row in range(len(view)):
            seen, line = sees[row]
            visible = sorted((int(seen.positions[c]), int(seen.slots[c])) for c in seen.mask[line].nonzero()[0])
            assert [position for position, _ in visible] == list(range(int(view.positions[row]) + 1))
            out[row] = digest("out", [self.kv[slot] for _, slot in visible])
        return HiddenRows(out)


class HashBlock(HashLearned):
    """A block drafter: committed tokens give context by their own states; what is asked gets several levels at once."""

    def __init__(self, capacity: int, vocabulary: int, reads: Sequence[int], shape: BlockShape) -> None:
        super().__init__(capacity, vocabulary, reads)
        self.shape = shape
        self._node_at: dict[int, int] = {}
        self._parent_of: dict[int, int] = {}
        self._context_of: dict[int, int] = {}
        self._drafted: dict[int, tuple[int, int]] = {}
        """For each slot whose node had a block: the node, and how many levels below it that reached."""

    def forward(self, view: BatchView, hidden: None) -> HiddenRows:
        assert view.levels is not None
        columns = (view.nodes, view.slots, view.parents, view.levels)
        for node, slot, parent, level in zip(*map(np.ndarray.tolist, columns), strict=True):
            self._node_at[slot], self._parent_of[slot] = node, parent
            if level == CONTEXT:
                self.kv[slot] = digest("context", [self.known[node, layer] for layer in self.reads])
                self._context_of[slot] = node
        return HiddenRows([0] * len(view))

    def candidates(
        self, view: BatchView, hidden: list[int], wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        sees = {row: (seen, line) for seen in view.views for line, row in enumerate(seen.rows.tolist())}
        answers = []
        for row in wanted:
            seen, line = sees[row]
            visible = sorted((int(seen.positions[c]), int(seen.slots[c])) for c in seen.mask[line].nonzero()[0])
            assert [position for position, _ in visible] == list(range(int(view.positions[row]) + 1))
            assert view.levels is not None
            if view.levels[row] == KEPT:
                assert self._reaches(int(view.slots[row])), "a block above has drafted what is asked of it"
            held = [self._context_of.get(slot) == self._node_at[slot] for _, slot in visible]
            assert held == sorted(held, reverse=True), "the context of a block has no hole"
            assert not held[-1], "a row that is asked about stands in its block"
            seen_as = [self.kv[slot] if known else 0 for (_, slot), known in zip(visible, held, strict=True)]
            if view.levels[row] != KEPT:
                reach = self.shape.reach(held.count(False))
                self._drafted[int(view.slots[row])] = int(view.nodes[row]), reach
            for level in range(1 + view.ahead):
                key = digest("block", level, seen_as, view.path(row).tolist())
                ranked = sorted(range(self.vocabulary), key=lambda token, key=key: digest("rank", key, token))[:count]
                scores = [-0.5 * (k + 1) for k in range(len(ranked))]
                answers.append(Candidates(int(view.nodes[row]), ranked, scores, level))
        return answers

    def _reaches(self, slot: int) -> bool:
        distance = 0
        while (slot := self._parent_of[slot]) >= 0:
            distance += 1
            node, reach = self._drafted.get(slot, (0, 0))
            if node == self._node_at[slot]:
                return distance <= reach
        return False


def columns(view: BatchView) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return view.slots, view.parents, view.nodes


class HiddenRows(list[int]):
    """Hidden states that can be indexed by a list of rows, as a tensor can."""

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        picked = [super(HiddenRows, self).__getitem__(i) for i in index] if isinstance(index, list) else None
        return super().__getitem__(index) if picked is None else HiddenRows(picked)


def plain_kv(tokens: Sequence[int], stages: int) -> list[list[int]]:
    """[stages][positions]: what every replica must hold for a committed prefix."""
    hidden: list[int] = list(tokens)
    table = []
    for stage in range(stages):
        kv = [digest("kv", stage, value) for value in hidden]
        table.append(kv)
        hidden = [digest("out", stage, seen) for seen in plainly_seen(stage, kv)]
    return table


def plainly_seen(stage: int, kv: Sequence[int]) -> list[list[int]] | list[int]:
    """Return what each row of a text computes with, on a stage where the rows' keys and values are ``kv``."""
    if carries_state(stage):
        return list(accumulate(kv, lambda state, one: stepped(state, [one]), initial=0))[1:]
    return [list(kv[: i + 1]) for i in range(len(kv))]


def plain_next(tokens: Sequence[int], stages: int, vocabulary: int, seed: int) -> int:
    """The target's next token after ``tokens``."""
    kv = plain_kv(tokens, stages)[-1]
    out = digest("out", stages - 1, plainly_seen(stages - 1, kv)[-1])
    return digest("token", seed, out, list(tokens)) % vocabulary


def plain_decode(
    prompt: Sequence[int], stages: int, vocabulary: int, seed: int, max_tokens: int, stop_ids: frozenset[int]
) -> list[int]:
    """Plain autoregressive decoding, by definition."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(plain_next(tokens, stages, vocabulary, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
