"""Finds the stage or host that is at fault where stages contradict each other, or the engine."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from penstock.messages import Delivery, Failed, Frame

log = logging.getLogger(__name__)

ANY_STAGE: Final = -1
"""The number that stands for an unknown stage of a pipeline."""
MOST_FAULTS: Final = 2
"""Number of faults within ``FAULTS_WITHIN_S`` for which a host is cut off. One may be chance."""
FAULTS_WITHIN_S: Final = 600.0
"""Seconds within which a host's faults, and its complaints of others, count together. Losses of hosts count together
for as long (``hosts.remote.LOSSES_WITHIN_S``)."""
RECALL_S: Final = 1.0
"""Seconds that stages have to say which batch they got: fewer than an ended connection waits for a better cause."""


Owner = Callable[[Delivery, Sequence[Frame]], bool]
"""Takes in a message with its frames, and returns whether the engine now has something to do."""


def handed(owner: Owner, delivery: Delivery, frames: Sequence[Frame]) -> bool:
    """Hand a message to its owner. If that fails, only the owner's pipeline is lost."""
    try:
        return owner(delivery, frames)
    except Exception as error:
        log.exception("a message could not be taken in")
        failed = Failed(stage=ANY_STAGE, cause=f"{type(delivery.message).__name__}: {type(error).__name__}: {error}")
        return owner(Delivery(message=failed), [])


class HostFaults:
    """The faults of other hosts, by their names in plans. ``cut_off`` is called with one that has had too many.

    Stages then start elsewhere, if they can: neither a broken device nor a lying member ends the engine.
    """

    def __init__(self, now: Callable[[], float], cut_off: Callable[[str, str], None]) -> None:
        self._now = now
        self._cut_off = cut_off
        self._times: dict[str, deque[float]] = {}
        self._blamed: dict[str, tuple[str, float]] = {}
        """Host -> the host that it has blamed last and was believed, and when."""

    def note(self, host: str, cause: str) -> None:
        """Note that a stage on a host failed by itself. The second time within FAULTS_WITHIN_S the host is cut off."""
        times = self._times.setdefault(host, deque(maxlen=MOST_FAULTS))
        times.append(self._now())
        if len(times) == MOST_FAULTS and times[0] >= self._now() - FAULTS_WITHIN_S:
            times.clear()
            self._cut_off(host, f"stages there have failed {MOST_FAULTS} times: {cause}")

    def believes(self, host: str, against: str) -> bool:
        """Whether ``host`` is believed when it complains that the host ``against`` has sent something unusable.

        A host that blames the engine's own host, or a second host within FAULTS_WITHIN_S, is not believed: it is itself
        what its complaints have in common. A liar can thus have one other host lost at most.
        """
        if host in ("", against):
            return True
        now = self._now()
        blamed, at = self._blamed.get(host, (against, now))
        if not against or (blamed != against and at >= now - FAULTS_WITHIN_S):
            return False
        self._blamed[host] = against, now
        return True


class Lose(Protocol):
    def __call__(self, stage: int, cause: str, details: str = "", beside: int = ANY_STAGE) -> None:
        """Lose a pipeline because of a stage; the process of the one ``beside`` it is not used again either."""
        ...


class Blame:
    """Says which stage of a pipeline is at fault where two of them contradict each other.

    ``hosts`` are those of the stages as plans name them, ``who`` describes a stage for people.
    """

    def __init__(self, hosts: Sequence[str], who: Callable[[int], str], faults: HostFaults, lose: Lose) -> None:
        self.until = math.inf
        """Time at which the inquiry under way ends; infinite for none. Its end is a loss."""
        self._hosts, self._who, self._faults, self._lose = hosts, who, faults, lose
        self._submitted = self._complaint = ""
        """``_submitted``: the digest of the batch in question; "" if no batch had its number."""
        self._told: dict[int, str] = {}
        """Stage -> the digest of the batch that it got; "" if it got none so far, or has forgotten it."""

    @property
    def inquires(self) -> bool:
        """Whether an inquiry has begun. It stays so, since every inquiry ends with the loss of the pipeline."""
        return bool(self._complaint)

    def complain(self, receiver: int, complaint: str, details: str = "") -> None:
        """Take in a stage's complaint about a message of the stage before it."""
        sender = receiver - 1
        if self._faults.believes(self._hosts[receiver], against=self._hosts[sender]):
            self._lose(sender, f"{self._who(receiver)} {complaint}", details, beside=receiver)
        else:
            cause = f"it says of {self._who(sender)} what it has said of another host before: it {complaint}"
            self._lose(receiver, cause, details, beside=sender)

    def inquire(self, submitted: str, complaint: str, until: float) -> None:
        """Begin an inquiry into a result that does not fit its batch; all stages are asked for the batch's digest.

        Every stage passes a batch on as it came, apart from its states. The first one that got another one than was
        submitted was sent it by the stage before; where none says so, the last stage has made the result up.
        """
        self._submitted, self._complaint, self.until = submitted, complaint, until

    def told(self, stage: int, digest: str) -> None:
        """Take in a stage's answer."""
        self._told[stage] = digest
        if len(self._told) == len(self._hosts):
            self.conclude()

    def conclude(self) -> None:
        """End the inquiry with the answers that have come."""
        self.until = math.inf
        differs = [stage for stage, digest in self._told.items() if digest not in ("", self._submitted)]
        # The lowest stage that got something else was sent it by the one before, which says that it got what was
        # submitted, or says nothing.
        noticed = min(differs, default=0)
        if noticed:
            self.complain(noticed, f"was sent another batch than was submitted: {self._complaint}")
        else:  # the first one, which says that the engine lies, or else the last one
            self._lose(0 if differs else len(self._hosts) - 1, self._complaint)
