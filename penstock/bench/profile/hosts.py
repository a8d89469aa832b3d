"""Measures hosts for a person, who sees how far it is."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from rich.console import Console
from rich.progress import Progress

from penstock.bench.profile.options import HostsOptions
from penstock.engine.places.opening import open_host
from penstock.engine.profile.hosts import HostsProfile, completed, forgotten, known_profile
from penstock.engine.resolve import check_options
from penstock.progress import progress_bar


def hosts_profile(options: HostsOptions, console: Console, *, anew: bool = False) -> HostsProfile:
    """All of the hosts that are named: measured where it is not known yet, or else ``anew``. Raises ConfigError."""
    engine = options.engine_options()
    check_options(engine)
    with closing(open_host(engine)) as host, progress_bar(console) as bar:
        known = known_profile(engine, host)
        return completed(forgotten(known) if anew else known, host, partial(Counted, bar))


class Counted:
    """A line of the bar that is told how many steps are done."""

    def __init__(self, bar: Progress, what: str) -> None:
        self._bar = bar
        self._task = bar.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
