"""Recovers from the loss of a stage or the drafter: all requests begin anew on new stages, and keep their tokens.

                   a stage is lost                      all have started
      running ----------------------> stages restart ----------------------> running
         |  ^                           |        ^
         |  |                           '--------'  one cannot start: once more, later
         |  | it has started
         |  '------------------ drafter restarts; a stand-in drafts meanwhile
         '--------------------------^
           the drafter alone is lost

When hosts are back from which stages were moved, and nothing runs or somebody asks for it, these stages restart there
as if they were lost. So do all of them when a request ends the rest of an idle engine, which holds no weights.

A request begins anew as after a preemption: its text so far becomes its prompt, and the tokens that follow are the
same, since each is a function of the text before it. Nothing here knows how stages are started: ``Parts`` does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from typing import Final, Protocol

from penstock.core import CheckpointChanged, PipelineError, PipelineLost
from penstock.drafters.base import Drafter
from penstock.pipeline.base import Clock, Pipeline
from penstock.requests.request import Request

log = logging.getLogger(__name__)

MOST_LOSSES: Final = 3
"""Number of losses of stages in a row, without a token between them, after which a request ends, since it may be their
cause. If no request has lived through so many, the engine ends. One or two may be chance."""
IN_A_ROW_S: Final = 600.0
"""Seconds from the beginning of a recovery after which the next loss no longer counts as in a row with it. Losses of
hosts count together for as long (``hosts.remote.LOSSES_WITHIN_S``)."""
FIRST_DELAY: Final = 1.0
"""Seconds before the second attempt in a row; each further one waits twice as long as the one before. The first attempt
follows at once; without a delay a loss that lasts would be met in a busy loop."""
LONGEST_DELAY: Final = 15.0
"""Upper limit of the wait between two attempts, in seconds: hosts that are back are noticed within that."""


class Parts(Protocol):
    """The pipeline and the drafter of an engine, and the way to start them."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that the engine uses now."""
        ...

    @property
    def drafter(self) -> Drafter | None:
        """The drafter or, while it restarts, one that stands in for it."""
        ...

    @property
    def apart(self) -> frozenset[int]:
        """The stages after which batches leave for another host; -1 stands for the engine."""
        ...

    def drop_lost(self) -> bool:
        """End what is lost and what cannot go on without it. Returns whether that includes stages of the target."""
        ...

    def drop_stages(self) -> None:
        """Have the target's stages leave their pipeline, to be started again, perhaps elsewhere."""
        ...

    def drop_all(self) -> None:
        """End stages and drafter, so that they hold no memory."""
        ...

    @property
    def out_of_place(self) -> bool:
        """Whether stages would be started elsewhere now, since hosts are back from which they were moved."""
        ...

    @property
    def drafter_is_back(self) -> bool:
        """Whether a drafter whose host was lost could be started now beside the stages that run."""
        ...

    @property
    def may_return(self) -> bool:
        """Whether hosts that are lost may come back, however late."""
        ...

    def start(self) -> Generator[float | None]:
        """Start what is missing. Yields the time at which to resume this, unless a message comes before.

        Raises PipelineError if a stage of the target cannot start; without the drafter it goes on.
        """
        ...


class Requests(Protocol):
    """The part of the engine's loop that recovery uses."""

    tokens: int
    """Tokens committed so far, over all requests."""

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        ...

    @property
    def running(self) -> list[Request]:
        """The requests that are being computed."""
        ...

    def vacate(self) -> None:
        """Have all running requests wait, to begin anew: the new stages hold none of their rows."""
        ...

    def fail(self, request: Request, error: str) -> None:
        """End a request that cannot go on; ``error`` is what its caller is told."""
        ...

    def lose_all(self) -> None:
        """End all requests with an error, also those that wait."""
        ...

    def resume(self, pipeline: Pipeline, drafter: Drafter | None, apart: frozenset[int]) -> None:
        """Go on with new stages, which hold no rows yet."""
        ...

    def draft_with(self, drafter: Drafter | None) -> None:
        """Go on with another drafter, which has seen nothing yet."""
        ...


class Recovery:
    """Recovers from losses. A recovery that takes longer than ``timeout`` seconds ends with the loss as an error.

    With a timeout of 0 every loss is an error at once. If hosts may come back and the loop is stepped even without
    requests (``keeps_trying``), all requests end with the error, but the engine goes on trying.
    """

    def __init__(self, parts: Parts, clock: Clock, timeout: float) -> None:
        self.parts = parts
        self.reason: str | None = None
        """The loss in words, while requests wait for stages; None otherwise. May be read from any thread."""
        self.given_up: str | None = None
        """The error that requests ended with, while nothing can run until hosts are back; may be read from any
        thread."""
        self.keeps_trying = False
        """Whether attempts go on after the timeout."""
        self.due = math.inf
        """Time at which ``advance`` has something to do without a message; infinite for none."""
        self.resting = False
        """Whether stages and drafter have been ended until a request comes. May be read from any thread."""
        self.recoveries = 0
        """How often requests have waited for stages and then gone on."""
        self.recovery_seconds = 0.0
        """Seconds for which they have waited, all together."""
        self.drafter_losses = 0
        """How often the drafter alone was lost."""
        self._clock = clock
        self._timeout = timeout
        self._attempt: Generator[float | None] | None = None
        """The start that is under way, which runs until it waits for something; None between attempts."""
        self._attempts = 0
        """Failed attempts since the loss."""
        self._lost: PipelineLost | None = None
        """The loss because of which requests wait; None if they need not."""
        self._began_at = 0.0
        """Time at which the latest recovery or move began, in seconds."""
        self._moving = False
        """Whether nothing is lost, and stages move to hosts that are back."""
        self._asked_to_move = False
        """Whether stages are to move as soon as nothing is lost, though requests run."""
        self._losses = 0
        """Losses of stages in a row without a token between them."""
        self._tokens = -1
        """Tokens that had come by the latest loss; -1 before the first."""

    @property
    def lost(self) -> bool:
        """Whether requests wait because of a loss, not of a move or a rest. May be read from any thread."""
        return self._lost is not None and not self._moving and not self.resting

    def begin(self, loop: Requests, lost: PipelineLost) -> None:
        """Begin to recover from a loss. Raises ``lost`` if there is to be no recovery, PipelineError after too many."""
        if not self._timeout:
            raise lost
        # The attempt releases what it has started so far: some of it may be lost, too.
        self._stop_attempt()
        self._moving = False
        if self.parts.drop_lost():
            log.warning("%s; restarting, %d requests wait", lost, len(loop.running))
            self._count(loop, lost)  # before the requests wait: only those that run may be the cause
            loop.vacate()
            self._lost, self.reason = lost, str(lost)
        else:
            log.warning("%s; restarting it, requests go on meanwhile", lost)
            self.drafter_losses += 1
            loop.draft_with(self.parts.drafter)
        self._began_at = self._clock.now()
        self._attempts = 0
        # At once after the first loss in a row; later, and ever later, after further ones.
        self.due = self._began_at + delay(self._losses - 1 if self._lost else 0)

    def advance(self, loop: Requests) -> bool:
        """Go on with the recovery or move under way, if any. Returns whether there are stages to run requests on."""
        if self.resting and loop.busy:
            log.info("a request has come: the weights are loaded again")
            self.resting = False
            self._begin_move(PipelineLost("the weights are loaded again after a rest"))
        # ``_lost`` stays None: requests run while the drafter starts.
        if self._lost is None and self.due == math.inf and self.parts.drafter_is_back:
            self.due, self._began_at = self._clock.now(), self._clock.now()
        if self.due < math.inf:
            self._advance(loop)
        elif self.is_due_to_move(loop):
            self._move(loop)
        return self._lost is None

    def ask_to_move(self) -> bool:
        """Have stages that would be started elsewhere now move, though requests run. Returns whether there are any."""
        self._asked_to_move = bool(self._timeout) and self._lost is None and self.parts.out_of_place
        return self._asked_to_move

    def is_due_to_move(self, loop: Requests) -> bool:
        """Whether nothing is lost, stages would be started elsewhere now, and nothing runs or somebody asked for it."""
        may_move = bool(self._timeout) and self.due == math.inf and (self._asked_to_move or not loop.running)
        return may_move and self._is_out_of_place()

    def _is_out_of_place(self) -> bool:
        """Whether stages would be started elsewhere now. They stay where they are if that cannot be told."""
        try:
            return self.parts.out_of_place
        except Exception:
            log.exception("stages stay where they are: it cannot be told where they could be")
            self._asked_to_move = False
            return False

    def _move(self, loop: Requests) -> None:
        """Have stages move to the hosts where they would have been, had these not been lost."""
        log.warning("hosts are back: stages move to them")
        self.parts.drop_stages()
        loop.vacate()
        self._begin_move(PipelineLost("stages move to hosts that are back"))

    def _begin_move(self, cause: PipelineLost) -> None:
        """Begin to start stages that have not been lost; ``cause`` is what requests wait for."""
        self._lost = cause
        self.reason, self._moving, self._asked_to_move = str(self._lost), True, False
        self._attempts, self._began_at = 0, self._clock.now()
        self.due = self._began_at

    def rest(self, loop: Requests) -> None:
        """End stages and drafter until a request comes. Nothing runs, waits or is lost now."""
        log.info("no request has come for a while: the weights are freed until one comes")
        self.parts.drop_all()
        loop.vacate()
        loop.draft_with(self.parts.drafter)
        # Set although nothing was lost: requests that come have to wait for stages.
        self._lost, self.resting = PipelineLost("the weights have been freed"), True

    @property
    def may_rest(self) -> bool:
        """Whether stages are there, and nothing is lost or being started."""
        return bool(self._timeout) and self._lost is None and self.due == math.inf

    def stop(self) -> None:
        """End the attempt under way and begin no other."""
        self._stop_attempt()
        self.due = math.inf

    @property
    def _latest(self) -> float:
        """Time at which to give up; infinite where there is no limit."""
        bounded = self._lost is not None and self.given_up is None and not self._moving
        return self._began_at + self._timeout if bounded else math.inf

    @property
    def seconds(self) -> float:
        """Seconds since recovery, or a move, began."""
        return self._clock.now() - self._began_at

    def _advance(self, loop: Requests) -> None:
        if self._lost is not None and self._clock.now() >= self._latest:
            self._give_up(loop, self._lost, self._too_late("its replacement has not started"))
        if self._attempt is None:
            if self._clock.now() < self.due:
                return
            self._attempt = self.parts.start()
        try:
            # Runs the attempt up to its next wait: the engine's loop is never blocked by a start.
            due = next(self._attempt)
        except StopIteration:
            self._finish(loop)
        except PipelineError as error:
            self._fail(loop, error)
        except Exception as error:
            log.exception("stages could not be started")
            self._fail(loop, PipelineError(f"{type(error).__name__}: {error}"))
        else:
            self.due = self._latest if due is None else min(due, self._latest)

    def _fail(self, loop: Requests, error: PipelineError) -> None:
        """Note that the attempt has failed, and have another one begin later, if there is to be one."""
        self._attempt = None
        self._attempts += 1
        self._retry(loop, error)

    def _retry(self, loop: Requests, error: PipelineError) -> None:
        assert self._lost is not None, "a drafter that cannot be had is done without"
        if self._moving:  # the stages have left their old places: from now on this counts as a loss
            self._moving, self._began_at = False, self._clock.now()
        again = self._clock.now() + delay(self._attempts)
        if isinstance(error, CheckpointChanged):
            self._give_up(loop, self._lost, str(error))
        elif again > self._latest:
            self._give_up(loop, self._lost, self._too_late(str(error)))
        if self.given_up is None:
            log.warning("the restart has failed: %s; trying again in %.0f s", error, delay(self._attempts))
        self.due = again

    def _finish(self, loop: Requests) -> None:
        self._attempt, self.due = None, math.inf
        lost, self._lost = self._lost, None
        # Where no request waited, only the drafter has been started: the stages and their rows are as they were.
        if lost is None:
            loop.draft_with(self.parts.drafter)
        else:
            if not self._moving:
                self.recoveries += 1
                self.recovery_seconds += self.seconds
            log.warning("recovered after %.1f s", self.seconds)
            loop.resume(self.parts.pipeline, self.parts.drafter, self.parts.apart)
        self.reason = self.given_up = None

    def _give_up(self, loop: Requests, lost: PipelineLost, problem: str) -> None:
        """End all requests with the error. Raises it unless the engine goes on waiting for hosts."""
        error = f"{lost}; {problem}"
        if not (self.keeps_trying and self.parts.may_return):
            raise PipelineError(error) from lost  # the engine's end stops the attempt
        log.error("%s; no request is taken until hosts are back", error)
        self.given_up = error
        loop.lose_all()

    def _too_late(self, problem: str) -> str:
        return f"no recovery within {self._timeout:.0f} s: {problem}"

    def _count(self, loop: Requests, lost: PipelineLost) -> None:
        """Count the loss against the requests that ran, and the stages. Raises PipelineError if it is one too many."""
        # ``seconds`` still counts from the recovery before this loss.
        in_a_row = loop.tokens == self._tokens and self.seconds <= IN_A_ROW_S
        self._losses = self._losses + 1 if in_a_row else 1
        self._tokens = loop.tokens
        for request in loop.running:
            request.losses += 1
        suspects = [request for request in loop.running if request.losses >= MOST_LOSSES]
        for request in suspects:
            loop.fail(request, too_many_losses("stage", str(lost)))
        if self._losses >= MOST_LOSSES and not suspects:
            raise PipelineError(f"{lost}; {MOST_LOSSES} losses in a row without a token between them") from lost

    def _stop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None


def too_many_losses(what: str, lost: str) -> str:
    """The error of a request that was there at ``MOST_LOSSES`` losses of a "stage" or "replica": a RequestError's."""
    return f"{MOST_LOSSES} times in a row a {what} was lost before its next token: {lost}"


def delay(failures: int, longest: float = LONGEST_DELAY) -> float:
    """Seconds, at most ``longest``, before the next attempt, after ``failures`` failed ones in a row."""
    return 0.0 if failures <= 0 else min(longest, FIRST_DELAY * 2.0 ** min(failures - 1, 16))
