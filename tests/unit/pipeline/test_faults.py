"""Who is at fault where two stages contradict each other."""

from __future__ import annotations

import math

import pytest

from penstock.pipeline.loss import ANY_STAGE, FAULTS_WITHIN_S, Blame, HostFaults

TRUE, FALSE = "1" * 64, "2" * 64


class Losses:
    """A pipeline over these hosts, and what is lost of it, at times that the test says."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.now = 0.0
        self.lost: list[tuple[int, str, int]] = []
        self.cut_off: list[str] = []
        self.faults = HostFaults(lambda: self.now, lambda host, cause: self.cut_off.append(host))
        self.blame = Blame(hosts, lambda stage: f"stage {stage}", self.faults, self.lose)

    def lose(self, stage: int, cause: str, details: str = "", beside: int = ANY_STAGE) -> None:
        self.lost.append((stage, cause, beside))

    def inquired(self, submitted: str, *told: str) -> tuple[int, str, int]:
        """The loss after an inquiry in which the stages have told this."""
        self.blame.inquire(submitted, "result 7 is wrong", math.inf)
        for stage, digest in enumerate(told):
            assert not self.lost
            self.blame.told(stage, digest)
        (lost,) = self.lost
        return lost


def test_the_sender_is_lost_and_the_receiver_is_not_used_again() -> None:
    losses = Losses("a", "b", "c")
    losses.blame.complain(1, "cannot use what it has sent")
    assert losses.lost == [(0, "stage 1 cannot use what it has sent", 1)]


def test_who_blames_a_second_host_is_at_fault_itself_for_a_while() -> None:
    losses = Losses("a", "liar", "b", "liar")
    for receiver in (1, 1, 3, 3):
        losses.blame.complain(receiver, "cannot use it")
    assert [stage for stage, _, _ in losses.lost] == [0, 0, 3, 3]
    losses.now += FAULTS_WITHIN_S + 1
    losses.blame.complain(3, "cannot use it")
    assert losses.lost[-1][0] == 2


@pytest.mark.parametrize(
    ("sender", "receiver", "lost"), [("", "other", 1), ("other", "", 0), ("same", "same", 0), ("", "", 0)]
)
def test_the_engines_own_host_is_believed_and_nobody_against_it(sender: str, receiver: str, lost: int) -> None:
    losses = Losses(sender, receiver)
    losses.blame.complain(1, "cannot use it")
    assert [stage for stage, _, _ in losses.lost] == [lost]


@pytest.mark.parametrize(
    ("submitted", "told", "culprit", "beside"),
    [
        (TRUE, (TRUE, TRUE, TRUE), 2, ANY_STAGE),
        (TRUE, (TRUE, FALSE, FALSE), 0, 1),
        (TRUE, (TRUE, TRUE, FALSE), 1, 2),
        (TRUE, (FALSE, FALSE, FALSE), 0, ANY_STAGE),
        (TRUE, (TRUE, "", ""), 2, ANY_STAGE),  # the batch is still on its way
        ("", ("", "", TRUE), 1, 2),  # nobody has submitted it
        ("", ("", "", ""), 2, ANY_STAGE),
    ],
)
def test_the_first_that_was_sent_another_batch_tells_who_has_changed_it(
    submitted: str, told: tuple[str, ...], culprit: int, beside: int
) -> None:
    lost, cause, other = Losses("a", "b", "c").inquired(submitted, *told)
    assert (lost, other) == (culprit, beside)
    assert "result 7 is wrong" in cause


def test_an_inquiry_ends_with_the_answers_that_have_come() -> None:
    losses = Losses("a", "b", "c")
    losses.blame.inquire(TRUE, "result 7 is wrong", 1.5)
    assert (losses.blame.inquires, losses.blame.until) == (True, 1.5)
    losses.blame.told(1, FALSE)
    losses.blame.conclude()
    assert [stage for stage, _, _ in losses.lost] == [0]
