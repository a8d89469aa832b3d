"""Recordings without models: random distributions, cut as ``penstock bench --record`` cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.lab.record import FORMAT, SHAPES, Fingerprint, Header, Recording, row_of
from penstock.messages import Sampling
from penstock.stage.sampler import pick_one

TARGET = Fingerprint(name="target", config="c0" * 32, tokenizer="f0" * 32)
DRAFT = Fingerprint(name="draft", config="d0" * 32, tokenizer="f0" * 32)


def make_recording(
    lengths: Sequence[int] = (5, 7), vocabulary: int = 24, closeness: float = 0.7, **sampling: Any
) -> Recording:
    """Requests of these lengths; the draft's logits are the target's with noise, none of it at ``closeness`` 1."""
    rng = np.random.default_rng(0)
    columns: dict[str, list[Any]] = {}
    for seed, length in enumerate(lengths):
        one = Sampling(seed=seed, **{"temperature": 1.0, **sampling})
        for position in range(3, 3 + length):
            target_V = 2 * rng.normal(size=vocabulary)
            draft_V = target_V + 2 * (1 - closeness) * rng.normal(size=vocabulary)
            token = pick_one(target_V, one, position, 0).token
            for name, value in row_of(target_V, draft_V, token, one, position).items():
                columns.setdefault(name, []).append(value)
    arrays = {**columns, "offsets": np.cumsum([0, *lengths]), "prompt_lengths": [3] * len(lengths)}
    shared = {name: getattr(one, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    header = Header(
        format=FORMAT,
        target=TARGET,
        draft=DRAFT,
        vocabulary=vocabulary,
        **shared,
        seeds=tuple(range(len(lengths))),
        undecided=0,
        versions={},
    )
    return Recording(header=header, **{name: np.asarray(arrays[name], dtype) for name, (dtype, _) in SHAPES.items()})
