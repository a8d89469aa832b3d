"""Measures hosts under a progress bar."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from penstock.bench.profile.options import HostsOptions
from penstock.bench.prompts import read_prompts
from penstock.engine.options import model_folder
from penstock.engine.places.opening import open_host
from penstock.engine.profile.hosts import HostsProfile, completed, forgotten, known_profile
from penstock.engine.profile.measure import CONTEXTS, ROWS
from penstock.engine.resolve import check_options
from penstock.progress import progress_bar


def hosts_profile(
    options: HostsOptions, console: Console, *, anew: bool = False, texts: Path | None = None
) -> HostsProfile:
    """The profile of the named hosts; only missing parts are measured, or everything if ``anew``.
    Raises ConfigError."""
    engine = options.engine_options()
    check_options(engine)
    tokens = [] if texts is None else tokens_of(engine.model, texts)
    with closing(open_host(engine)) as host, progress_bar(console) as bar:
        known = known_profile(engine, host)
        return completed(forgotten(known) if anew else known, host, partial(Counted, bar), tokens)


def tokens_of(model: str, texts: Path) -> list[int]:
    """Token ids of a file's prompts, joined and cut to the longest text that is measured. Raises ConfigError."""
    from penstock.models.checkpoint import open_checkpoint
    from penstock.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(model_folder(model, "target")).path)
    longest = CONTEXTS[-1] + ROWS[-1]
    return list(chain.from_iterable(map(tokenizer.encode, read_prompts(texts, longest))))[:longest]


class Counted:
    """A task of the progress bar that is told how many steps are done."""

    def __init__(self, bar: Progress, what: str) -> None:
        self._bar = bar
        self._task = bar.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
