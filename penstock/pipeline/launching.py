"""What starts stage processes: this host's fork server, or the agent of another host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.pipeline.plan import StageSpec


class Launcher(Protocol):
    """Starts stages on one host, and says which of them have ended. Its methods may be called from any thread."""

    @property
    def alive(self) -> bool:
        """Whether it can start stages. One that cannot reports all that it has started as ended."""
        ...

    @property
    def clock_offset(self) -> float:
        """Seconds to add to a moment of this process's clock for the same moment of the host's, roughly."""
        ...

    def listen(self, process: str, pipe: int) -> None:
        """Have the end of the process of this name written to ``pipe``, as a line of JSON; it has yet to start."""
        ...

    def forget(self, process: str) -> None: ...

    def start(self, spec: StageSpec) -> None:
        """Have a stage process started. That it came to nothing is reported like any other end."""
        ...

    def kill(self, process: str) -> None: ...

    def ended(self, process: str) -> bool:
        """Whether a process is known to have ended, reported or not."""
        ...


@dataclass(frozen=True)
class Elsewhere:
    """The hosts beside the engine's own."""

    launchers: Mapping[str, Launcher]
    """By the name that plans give a host."""
    reached_at: str
    """This host's address, as those hosts reach it."""
    cut_off: Callable[[str, str], None]
    """Have a host, by that name, be lost for a cause: others do not reach it, though this one does."""
    private_network: bool = False
    """Whether plain connections may leave this host."""
