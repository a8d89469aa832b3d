"""The loss of a pipeline: who is at fault, which report counts, and how long silence may last."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, Protocol

from penstock.core import PenstockError, PipelineLost
from penstock.messages import Delivery, Failed, Frame, Span

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------------- loss
# The loss of a pipeline: which of several reports is the one to raise, and when.


class Source(IntEnum):
    """The source of a report; a higher one says more about the cause."""

    CONNECTION = 0
    """A process that was connected with the stage: the connection has ended."""
    PROCESS = 1
    """The process that forked the stage: the stage's process has ended."""
    STAGE = 2
    """The stage itself, or a process that has waited for it in vain. Nothing says more."""


GRACE_S: Final = {Source.CONNECTION: 1.5, Source.PROCESS: 0.1, Source.STAGE: 0.0}
"""Seconds to wait for a report that says more about the cause.

A connection mostly ends with the process behind it, which may belong to another pipeline. A process's own report is
already under way when its end is noticed.
"""


class EngineUnreached(PenstockError):
    """A stage has no connection to its engine."""


class Loss:
    """The loss of a pipeline. The first report counts unless one that says more follows within its grace."""

    def __init__(self) -> None:
        self.error: PipelineLost | None = None
        self.at = math.inf
        """Time in seconds at which the loss is raised; reports after it change nothing."""
        self._source = Source.CONNECTION

    def report(self, source: Source, error: PipelineLost, now: float) -> None:
        """Take in a report of the loss, which came at ``now`` (seconds) from ``source``."""
        # A better report has a grace of its own, shorter than the one that is under way.
        if self.error is None or (source > self._source and now < self.at):
            self.error, self._source = error, source
            self.at = now + GRACE_S[source]

    @property
    def source(self) -> Source:
        """The source of the report that counts."""
        return self._source

    def raise_if_due(self, now: float) -> None:
        """Raise the PipelineLost that counts once no better report can follow."""
        if self.error is not None and now >= self.at:
            raise self.error


# -------------------------------------------------------------------------------------------------------------- silence
# How long each stage has been silent while the engine listened, and how long it may be.

LOOK_EVERY: Final = 1.0
"""Seconds of listening between two checks for silent stages. Stages send heartbeats as often (``worker.HEARTBEAT``)."""
LEAST_PATIENCE: Final = 10.0
"""Seconds for which any stage may be silent: several heartbeats, of which a busy host may delay one or two."""
BATCHES: Final = 5
"""Number of batches: a stage may be silent for as long as so many of its slowest take. A busy host may slow a batch
several times; a larger number finds a stuck stage later."""
FIRST_PATIENCE: Final = 120.0
"""Seconds for which a computing stage may be silent while it is not known how long a batch takes. The first batch also
pays for what is read, compiled or recorded only then."""


class Listening:
    """Measures the time for which the engine has listened, from check to check.

    An engine that was stopped, or not stepped for a day, has not heard what the stages said meanwhile. A check
    therefore counts at most two intervals, however long ago the last one was.
    """

    def __init__(self, now: float, every: float = LOOK_EVERY) -> None:
        self._looked_at = now
        self._every = every

    @property
    def next_look(self) -> float:
        """Time in seconds at which the next check is due."""
        return self._looked_at + self._every

    def look(self, now: float) -> float:
        """The seconds that count since the last check."""
        counted = min(now - self._looked_at, 2 * self._every)
        self._looked_at = now
        return counted


class Silence:
    """Seconds for which each stage has been silent."""

    def __init__(self, stages: int) -> None:
        self._seconds = [0.0] * stages

    def heard(self, stage: int) -> None:
        """Note that a message of this stage has come."""
        self._seconds[stage] = 0.0

    def listened(self, seconds: float) -> None:
        """Add these seconds of listening to the silence of every stage, which ``heard`` ends."""
        self._seconds = [before + seconds for before in self._seconds]

    def longer_than(self, allowed: Sequence[float]) -> int | None:
        """The stage that has been silent longest, of those that exceed their allowed seconds; None if there is none."""
        silent = [stage for stage, seconds in enumerate(self._seconds) if seconds > allowed[stage]]
        return max(silent, key=self._seconds.__getitem__, default=None)


class Patience:
    """How long each stage may be silent: a stage says nothing while it computes a batch.

    It may take five times its slowest batch, at least 10 seconds. While a batch with more rows than any before is in
    flight, the time grows in proportion to the rows.
    """

    def __init__(self, stages: int) -> None:
        self._slowest = [0.0] * stages
        """The longest computation of each stage, in seconds."""
        self._most_rows = 0
        """Largest number of rows of a batch that has come out."""

    def computed(self, spans: Sequence[Span], longest: float) -> None:
        """A batch has come out, ``longest`` seconds after it was sent: no stage has computed it for longer."""
        for span in spans:
            self._most_rows = max(self._most_rows, span.rows)
            if 0 <= span.stage < len(self._slowest):
                # A span is a stage's own statement: one that lies gains no patience beyond the batch's real time.
                seconds = min(longest, span.end - span.start)
                self._slowest[span.stage] = max(self._slowest[span.stage], seconds)

    def seconds(self, rows: int) -> list[float]:
        """The allowed seconds for each stage while a batch of ``rows`` rows is in flight; 0 for none."""
        if rows and not self._most_rows:
            return [FIRST_PATIENCE] * len(self._slowest)
        more = max(1.0, rows / self._most_rows) if rows else 0.0
        return [max(LEAST_PATIENCE, BATCHES * slowest * more) for slowest in self._slowest]


# --------------------------------------------------------------------------------------------------------------- faults
# The stage or host that is at fault where stages contradict each other, or the engine.

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
