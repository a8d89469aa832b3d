"""The interface for starting stage processes: through this host's fork server, or through another host's agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.pipeline.plan import StageSpec


class Launcher(Protocol):
    """Starts stages on one host, and reports those that have ended. Its methods may be called from any thread."""

    @property
    def alive(self) -> bool:
        """Whether it can start stages. When it no longer can, it reports all stages that it started as ended."""
        ...

    @property
    def clock_offset(self) -> float:
        """Seconds to add to a moment of this process's clock for the same moment of the host's, roughly."""
        ...

    def listen(self, process: str, pipe: int) -> None:
        """Have the end of a process written to ``pipe`` as a line of JSON. Call it before the process starts."""
        ...

    def forget(self, process: str) -> None: ...

    def start(self, spec: StageSpec) -> None:
        """Start a stage process. A failure to start is reported like any other end."""
        ...

    def kill(self, process: str) -> None: ...

    def ended(self, process: str) -> bool:
        """Whether a process is known to have ended, reported or not."""
        ...


@dataclass(frozen=True)
class Elsewhere:
    """The hosts beside the engine's own."""

    launchers: Mapping[str, Launcher]
    """Host's name in plans -> its launcher."""
    reached_at: str
    """This host's address, as those hosts reach it."""
    cut_off: Callable[[str, str], None]
    """Declare the host of this name lost, with a cause: other hosts do not reach it, though this one does."""
    private_network: bool = False
    """Whether plain connections may leave this host."""
