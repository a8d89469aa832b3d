"""A stage's process as the engine knows it: its weights as they are read, and the pipelines that it serves."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Final, Self

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from penstock.files import AUTO, EXACT
from penstock.messages import Loading, Started
from penstock.pipeline.base import Launcher, RankLink, StagePlan, StageSpec
from penstock.terminal import progress_of

# -------------------------------------------------------------------------------------------------------------- loading
# The progress of stages and drafter in reading their weights, and how it is shown.

FETCH: Final = "fetch"
"""The stand-in for a pipeline's name while a host fetches missing parts of the checkpoint, counted in bytes."""


class LoadingCount:
    """The weights that all processes have read, host by host, and the memory of those that have started.

    Use it as a ``with`` block around their start, and as ``on_loading`` of ``ProcessExecutor``.
    """

    def __init__(self) -> None:
        self._heard: dict[str, dict[tuple[str, int], Loading]] = {}
        """Host's name in plans -> (pipeline, stage) -> its latest report."""
        self._started: list[Started] = []

    def __call__(self, host: str, pipeline: str, said: Loading | Started) -> None:
        if isinstance(said, Started):
            self._started.append(said)
        elif pipeline == FETCH:
            self.show(host, "fetching weights", said.read, said.total)
        else:
            self._heard.setdefault(host, {})[pipeline, said.stage] = said
            self.show(host, "loading weights", *self.read(host))

    def show(self, host: str, does: str, done: int, total: int) -> None:
        """Show a host's progress. It is called whenever the host has read or fetched more; here it does nothing."""

    def read(self, host: str) -> tuple[int, int]:
        """Counts of the numbers that the processes on a host have read, and of all, as far as they have reported."""
        heard = self._heard.get(host, {}).values()
        return sum(one.read for one in heard), sum(one.total for one in heard)

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of weights, and of KV cache, that the started processes hold."""
        return sum(one.weight_bytes for one in self._started), sum(one.kv_bytes for one in self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class LoadingBar(LoadingCount):
    """A bar for each host, or a line every few seconds where ``console`` is no terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = progress_of(console, *columns)
        self._waits: TaskID | None = self._progress.add_task("starting", total=None, in_percent=True)
        self._bars: dict[str, TaskID] = {}
        """Host's name in plans -> its bar."""

    def show(self, host: str, does: str, done: int, total: int) -> None:
        if host not in self._bars:
            self._bars[host] = self._waits if self._waits is not None else self._progress.add_task("", in_percent=True)
            self._waits = None
        said = f"{host}: {does}" if host else does
        self._progress.update(self._bars[host], description=said, completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()


# -------------------------------------------------------------------------------------------------------- stage process
# A stage's process, which may serve one pipeline after another for as long as it lives.


@dataclass(eq=False)
class StageProcess:
    """A stage's process. Its ``launcher`` knows it by ``name``; ``plan`` says what it holds."""

    plan: StagePlan
    launcher: Launcher
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    address: str = ""
    """The address of its inbox; empty until it has started."""
    session: str = ""
    """The session in which it started last."""
    patience: float = 0.0
    """Seconds that it has to answer a call into another session: it may still be computing a batch."""
    distrusted: bool = False
    """Whether it was silent for too long, or broke the protocol."""
    reported: bool = False
    """Whether its end has been reported, or nobody has started it."""
    on_end: Callable[[str], None] | None = None
    """A callback, called with the cause when the process has ended."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    """The secret of the connections between the ranks, where these are on several hosts."""
    ranks: list[StageProcess] = field(default_factory=list)
    """The processes of the ranks behind the first, where these are on several hosts: their ends are this one's."""
    met: bool = False
    """Whether they have been started."""

    @property
    def gone(self) -> bool:
        """Whether the process has ended or was never started."""
        return self.reported or self.launcher.ended(self.name)

    @property
    def usable(self) -> bool:
        """Whether it can serve a pipeline: it lives, and so do the other ranks."""
        return not any(one.gone or one.distrusted for one in (self, *self.ranks))

    @property
    def link(self) -> RankLink | None:
        """The process's place as the first rank; None where its ranks are not on several hosts."""
        return RankLink(rank=0, secret=self.secret) if self.ranks else None

    def watched(self, on_end: Callable[[str], None] | None) -> None:
        """Have ``on_end`` called with the cause when this process has ended, or that of another rank."""
        self.on_end = on_end
        for rank, one in enumerate(self.ranks, start=1):
            one.on_end = None if on_end is None else partial(rank_ended, on_end, rank)

    def meet(self, spec: StageSpec, address: str, bind: Callable[[str], str]) -> None:
        """Start the other ranks, now that the first listens for them at ``address``. ``bind``: addresses by names."""
        if self.met:
            return
        self.met = True
        for rank, one in enumerate(self.ranks, start=1):
            link = RankLink(rank=rank, secret=self.secret, leader=address)
            one.reported = False
            one.launcher.start(replace(spec, process=one.name, bind=bind(one.name[:8]), link=link))

    def end(self, cause: str) -> None:
        """Note that it has ended."""
        self.reported = True
        if self.on_end is not None:
            self.on_end(cause)

    def holds(self, plan: StagePlan) -> bool:
        """Whether it has loaded the layers that this plan needs, in whichever place of a pipeline."""
        return held(self.plan) == held(plan)


def held(plan: StagePlan) -> StagePlan:
    """The part of a plan that cannot change once its layers are loaded.

    An engine asks for exact numerics only where it has them, so that a process loaded with "auto" computes the same.
    """
    numerics = AUTO if plan.numerics == EXACT else plan.numerics
    places = tuple(replace(place, threads=1) for place in plan.places)
    return replace(plan, numerics=numerics, threads=1, places=places, tap=None, emulation=None)


def take(processes: list[StageProcess], plan: StagePlan) -> StageProcess | None:
    """Remove and return a living process that holds what the plan needs; None if there is none."""
    found = next((one for one in processes if one.holds(plan) and one.usable), None)
    if found is not None:
        processes.remove(found)
    return found


def living(processes: Iterable[StageProcess]) -> list[StageProcess]:
    """Those of the processes that have not ended."""
    return [one for one in processes if not one.gone]


def with_ranks(processes: Iterable[StageProcess]) -> list[StageProcess]:
    """These processes and those of their other ranks, each once."""
    return list(dict.fromkeys(chain.from_iterable((one, *one.ranks) for one in processes)))


def rank_ended(on_end: Callable[[str], None], rank: int, cause: str) -> None:
    """Report the end of another rank as that of the stage."""
    on_end(f"rank {rank}: {cause}")
