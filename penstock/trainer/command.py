"""``penstock train``: data, hidden states, a fresh drafter, the loop under a progress bar, and the files written.

The output folder holds the drafter, and its subfolder ``training`` the hidden states, the run's state and curves.
"""

from __future__ import annotations

from rich.console import Console

from penstock.trainer.curves import draw
from penstock.trainer.kinds.base import Drafter
from penstock.trainer.loop import Run, train
from penstock.trainer.options import TrainOptions
from penstock.trainer.prepare import cached_states, choose_vocabulary, fresh_drafter, read_corpus, settings_of
from penstock.trainer.progress import Bar, say
from penstock.trainer.runs import make_run, planned
from penstock.trainer.setup import STATE, Setup, set_up
from penstock.trainer.state import State, load_state


def run_train(options: TrainOptions, console: Console | None = None) -> Drafter:
    """Train, and return the drafter that was written. Raises ConfigError for what cannot work before anything starts.

    An earlier run in the output folder with the same settings is resumed.
    """
    setup = set_up(options, console or Console(stderr=True))
    with setup.accelerator.main_process_first():
        corpus = read_corpus(setup)
        steps = planned(setup, corpus)
        vocabulary = choose_vocabulary(setup, corpus)
        settings = settings_of(setup, corpus, vocabulary)
        state = load_state(setup.work / STATE, settings)
        cache = cached_states(setup, corpus)
        fresh = fresh_drafter(setup, vocabulary, settings)
    run = make_run(setup, corpus, cache, fresh, vocabulary, steps)
    if state.step:
        say(setup.console, f"going on after step {state.step} of {len(run.steps)}")
    with Bar(setup.console, state.step, len(run.steps), setup.kind.shown) as bar:
        state = train(run, state, bar)
    return finish(setup, run, state, fresh)


def finish(setup: Setup, run: Run, state: State, fresh: Drafter) -> Drafter:
    """Write drafter and curves in the main process; the other processes open what it has written."""
    output, files = setup.options.output, setup.kind.files
    if setup.accelerator.is_main_process:
        files.write(output, fresh, setup.accelerator.unwrap_model(run.trainee).module, setup.target)
        draw(state.history, setup.work, setup.kind.shown)
        size = (output / files.file).stat().st_size
        say(setup.console, f"written: {output / files.file}, {size / 1e6:.1f} MB; curves in {setup.work}")
    setup.accelerator.wait_for_everyone()
    setup.accelerator.end_training()  # ends its threads: torch aborts a process that leaves them running
    return files.open(output, setup.target)
