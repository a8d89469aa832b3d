"""A block drafter's stage that is asked about the end of a text, for the tests."""

from __future__ import annotations

import torch

from penstock.messages import CONTEXT, PATH, Batch, Features, Opened, Rows, Sampling
from penstock.models.speculators.block import BlockStage
from penstock.stage.driver import StageCore
from tests.checkpoints import VOCAB

CAPACITY = 40
NAMED_TAPS = (2, 5, 7)
"""Hidden states that every layout's file names, in its own way: outputs of the layers 1, 4 and 6."""


class Text:
    """A text's tokens in a stage's slots, which are in no order, with random states of the target."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCAB, (count,), generator=generator).tolist()
        self.slots = torch.randperm(CAPACITY, generator=generator)[:count].tolist()
        self.states = torch.randn(count, len(NAMED_TAPS) * 32, generator=generator)

    def node(self, position: int) -> int:
        return position + 1


def asked(
    stage: BlockStage,
    text: Text,
    known: int,
    count: int,
    ahead: int,
    *,
    core: StageCore | None = None,
    until: int | None = None,
    sampling: Sampling | None = None,
) -> list[tuple[list[int], list[float]]]:
    """The candidates after the text's last token, level by level, where the states of the first ``known`` are known.

    ``until``: only so many of its tokens have come.
    """
    core = core or StageCore(stage, CAPACITY, is_last=True)
    core.reader = stage
    every = range(until or len(text.tokens))
    stage.add_features(
        Features(
            layers=list(NAMED_TAPS), nodes=[text.node(i) for i in range(known)], slots=text.slots[:known], width=96
        ),
        text.states[:known],
    )
    rows = Rows()
    for i in every:
        rows.append(7, text.node(i), text.slots[i], text.slots[i - 1] if i else -1, i, text.tokens[i])
    opened = [Opened(7, sampling or Sampling())]
    batch = Batch(stream=0, opened=opened, rows=rows, wanted=[every[-1]], candidates=count)
    batch.ahead, batch.alive = ahead, list(every)
    batch.feature_levels = [CONTEXT if i < known else PATH for i in every]
    _, _, _, answers = core.process(batch, None)
    assert [answer.level for answer in answers] == list(range(len(answers)))
    return [(answer.tokens, answer.scores) for answer in answers]
