"""The processes of a tensor parallel stage.

The stage's own leads. On its host it forks the others before it loads anything. Over several hosts each rank is a
process that the engine has started, the others once the first one listens for them:

    engine   starts rank 0                starts the others there
    rank 0      '--> listens, RanksMeet --'   loads               hears them, says where each is | joins the pipeline
    others                                    '--> load, Loaded --'                              | follow
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

from penstock.core import ConfigError
from penstock.messages import RankBytes
from penstock.pipeline.base import StagePlan, StageSpec
from penstock.pipeline.engine_end import compute_with, load_layers
from penstock.stage.linked import (
    Leader,
    LinkedExchange,
    Loaded,
    RankExchange,
    SharedExchange,
    StageRankLost,
    exchanges,
    follow,
    say_loaded,
)
from penstock.transport.outbox import Sockets

PR_SET_PDEATHSIG: Final = 1
"""The option of Linux's prctl that names the signal which a process gets when its parent ends."""
CHARACTERS: Final = 400
"""Most characters of a rank's problem that the stage tells on."""


class RankLoadError(ConfigError):
    """A rank of a stage could not load its share; the text is its own."""


@contextlib.contextmanager
def led(plan: StagePlan) -> Iterator[Leader | None]:
    """Start the other ranks of a stage on one host, and end them with the block. None for any other stage.

    They are forked from this process while it has one thread that matters and nothing loaded, and end with it.
    """
    if plan.ranks == 1 or plan.places:
        yield None
        return
    ends, parent = exchanges(plan.ranks), os.getpid()
    children = []
    for rank in range(1, plan.ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(plan, rank, ends, parent)
        children.append(pid)
    for end in ends[1:]:
        end.close()
    try:
        yield Leader(ends[0])
    finally:
        ends[0].close()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def linked(spec: StageSpec, sockets: Sockets) -> Iterator[LinkedExchange | None]:
    """The end of a rank's connections to the others on several hosts. None for any other stage."""
    if spec.link is None:
        yield None
        return
    with sockets.inbox(spec.bind) as inbox:
        yield LinkedExchange(spec.link.rank, spec.plan.ranks, spec.link.secret, inbox, sockets)


def follow_elsewhere(spec: StageSpec, exchange: LinkedExchange) -> None:
    """Run as a rank behind the first, which listens for this one, until that one ends."""
    assert spec.link is not None
    assert spec.link.leader is not None
    exchange.connect({0: spec.link.leader})
    with contextlib.suppress(StageRankLost):
        serve_rank(spec.plan, spec.link.rank, exchange)


def become_rank(plan: StagePlan, rank: int, ends: list[SharedExchange], parent: int) -> None:
    """Run as a rank's process from its beginning. It never returns."""
    code = 1
    try:
        end_with_parent(parent)
        for other, end in enumerate(ends):
            if other != rank:
                end.close()
        serve_rank(plan, rank, ends[rank])
    except StageRankLost:  # the stage has ended, and this rank with it
        code = 0
    except BaseException as error:
        if os.environ.get("PENSTOCK_DEBUG"):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def serve_rank(plan: StagePlan, rank: int, exchange: RankExchange) -> None:
    """Load a rank's share, and follow the first one. Raises StageRankLost once that has ended."""
    compute_with(threads_of(plan, rank))
    try:
        layers = load_layers(plan, rank=rank)
    except Exception as error:
        say_loaded(exchange, Loaded(problem=f"{type(error).__name__}: {error}"[:CHARACTERS]))
        raise
    layers.ranks.exchange = exchange
    say_loaded(exchange, Loaded(weight_bytes=layers.weight_bytes, kv_bytes=layers.kv_bytes))
    follow(exchange, layers, plan.capacity, plan.vocab_size)


def join_ranks(leader: Leader, layers: Any) -> list[RankBytes]:
    """Join loaded ``layers`` with the other ranks'. Returns the bytes that each rank holds, the first one's first.

    Raises RankLoadError where one could not load, and StageRankLost.
    """
    told = leader.loaded()
    if problem := next((one.problem for one in told if one.problem), ""):
        raise RankLoadError(problem)
    layers.ranks.exchange = leader.exchange
    return [RankBytes(weights=one.weight_bytes, kv=one.kv_bytes) for one in (layers, *told)]


def threads_of(plan: StagePlan, rank: int) -> int:
    """A rank's threads: those of its place, or a part of its stage's, as many as the others or one more."""
    if plan.places:
        return plan.places[rank].threads
    return max(1, plan.threads * (rank + 1) // plan.ranks - plan.threads * rank // plan.ranks)


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the stage's own ends, where it can: on Linux.

    Elsewhere the process ends when it next hears of the stage, that its sockets are closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
