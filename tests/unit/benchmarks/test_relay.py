"""The centralised executor's part: the stage for which a message is, and its transit time over modelled links."""

from __future__ import annotations

import pytest

from benchmarks.papers.relay import priced, receiver
from penstock.cluster.timing import LinkTiming
from penstock.emulation.stage import StageEmulation
from penstock.messages import Batch, Cancel, Message, Ready, Rows, Span
from penstock.pipeline.base import StagePlan


def passed(stages: int) -> Batch:
    """A batch that has come out of this many stages."""
    return Batch(stream=0, rows=Rows(), spans=[Span(stage, 0.0, 0.0, 0.0, 0.0, 0.0, 1) for stage in range(stages)])


@pytest.mark.parametrize(
    ("message", "stage"),
    [
        (passed(1), 1),
        (passed(2), 2),
        (passed(3), None),
        (Ready(stage=2), 1),
        (Ready(stage=0), None),
        (Ready(stage=99), None),
        (Ready(stage=-1), None),
        (Cancel(before=1, nodes=[]), None),
    ],
)
def test_whom_of_three_stages_a_message_is_for(message: Message, stage: int | None) -> None:
    assert receiver(message, 3) == stage


def plans(links: list[LinkTiming | None]) -> list[StagePlan]:
    return [
        StagePlan(
            model="m",
            first=i,
            last=i + 1,
            capacity=8,
            dtype="float32",
            device="cpu",
            max_model_len=8,
            vocab_size=8,
            emulation=StageEmulation(up=links[i], down=links[i + 1]),
        )
        for i in range(len(links) - 1)
    ]


def test_a_hop_between_stages_takes_twice_its_time_and_one_from_or_to_the_engine_does_not() -> None:
    links = [LinkTiming(0.1 * i, 100.0 * i, 4.0) for i in range(1, 5)]
    relayed = [plan.emulation or StageEmulation() for plan in priced(plans(list(links)))]
    assert (relayed[0].up, relayed[-1].down) == (links[0], links[-1])
    for before, after, link in zip(relayed, relayed[1:], links[1:], strict=False):
        assert before.down == after.up
        assert after.up is not None
        assert after.up.seconds(3, 20) == pytest.approx(2 * link.seconds(3, 20))


def test_without_emulation_and_with_one_stage_nothing_is_priced() -> None:
    for links in ([None] * 4, [LinkTiming(1.0, 1.0, 1.0)] * 2):
        assert priced(plans(list(links))) == plans(list(links))
