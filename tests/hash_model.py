"""The hash model: a row's KV is a hash of its input, its output a hash of the KV it sees in position order.

Whatever a row wrongly sees or fails to see changes every token after it, so bugs of visibility, slot reuse and order
show within milliseconds, without torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from penstock.messages import Candidates, Pick, Sampling
from penstock.stage.visibility import BatchView


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


class HashLayers:
    """``Layers`` of one stage. ``log`` records (node, positions seen) for the tests."""

    def __init__(self, stage: int, capacity: int, vocabulary: int) -> None:
        self.stage = stage
        self.vocabulary = vocabulary
        self.kv: list[int] = [0] * capacity
        self.rows_computed = 0

    def forward(self, view: BatchView, hidden: list[int] | None) -> HiddenRows:
        inputs = view.tokens.tolist() if hidden is None else hidden
        self.rows_computed += len(view)
        for i, slot in enumerate(view.slots.tolist()):
            self.kv[slot] = digest("kv", self.stage, inputs[i])
        out: list[int] = [0] * len(view)
        for seen in view.views:
            for line, row in enumerate(seen.rows.tolist()):
                visible = sorted((int(seen.positions[c]), int(seen.slots[c])) for c in seen.mask[line].nonzero()[0])
                positions = [position for position, _ in visible]
                assert positions == list(range(int(view.positions[row]) + 1)), "a row sees each position once"
                out[row] = digest("out", self.stage, [self.kv[slot] for _, slot in visible])
        return HiddenRows(out)

    def pick(
        self, view: BatchView, hidden: list[int], wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[Pick]:
        return [
            Pick(int(view.nodes[i]), digest("token", sampling.seed, hidden[i]) % self.vocabulary)
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


class HiddenRows(list[int]):
    """Hidden states that can be indexed by a list of rows, as a tensor can."""

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        picked = [super(HiddenRows, self).__getitem__(i) for i in index] if isinstance(index, list) else None
        return super().__getitem__(index) if picked is None else HiddenRows(picked)


def plain_kv(tokens: Sequence[int], stages: int) -> list[list[int]]:
    """[stages][positions]: what every replica must hold for a certain prefix."""
    hidden: list[int] = list(tokens)
    table = []
    for stage in range(stages):
        kv = [digest("kv", stage, value) for value in hidden]
        table.append(kv)
        hidden = [digest("out", stage, kv[: i + 1]) for i in range(len(kv))]
    return table


def plain_next(tokens: Sequence[int], stages: int, vocabulary: int, seed: int) -> int:
    """The target's next token after ``tokens``."""
    kv = plain_kv(tokens, stages)[-1]
    return digest("token", seed, digest("out", stages - 1, kv)) % vocabulary


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
