"""Learned drafters trained on the same tokens with as many updates: what they know, and what their trees are worth.

    python -m benchmarks.drafters.like_for_like DATA WORK [--updates 3000] [--seeds 3] [--only NAME ...]

DATA is a folder of texts, WORK a folder for states and drafters. Each drafter of the demo target learns every token of
it, in steps of 1,024 tokens; a seed decides the same order for all kinds. Held-out tokens at T = 0 are looked for among
each drafter's candidates where 0 to 4 tokens after the last known one are in flight, shown to the drafter as a pipeline
shows them. Trees of 4 to 64 nodes are drafted and verified by the engine itself, at T = 0 and T = 1; those of
some blocks also by a pass for each level.

A drafter's figures are written to benchmarks/measured/drafters/like_for_like.json as they are there, and are not
measured again with as many updates; a run that was broken off goes on. Weights stay in WORK.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.shared import virtual
from penstock.lab.grid import PLAIN
from penstock.lab.trainer.block import BlockTrainee
from penstock.lab.trainer.options import IN_FLIGHT, TrainOptions
from penstock.lab.trainer.run import cached_states, held_out, read_corpus, run_train, set_up
from penstock.lab.trainer.spd import SpdTrainee, lay_out
from penstock.lab.trainer.states import Batch, Loader
from penstock.models.speculators.base import TargetHead

HOW: Final = "Measured, with the demo target; trees in virtual time"
COMMON: Final[dict[str, Any]] = {"model": "demo", "max_length": 256, "batch_tokens": 1024, "dtype": "bfloat16"}
RECIPES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "eagle": ("eagle", {"learning_rate": 6e-3}),
    "eagle3": ("eagle3", {"learning_rate": 6e-3, "ttt_steps": 5}),
    "medusa": ("medusa", {"learning_rate": 3e-3, "heads": 5}),
    "spd": ("spd", {"learning_rate": 3e-3, "spec_layers": 2}),
    "dflash": ("dflash", {"learning_rate": 3e-3, "bidirectional": True, "in_flight": 0}),
    "dspark": ("dspark", {"learning_rate": 6e-3, "bidirectional": True, "in_flight": 0, "markov_rank": 64}),
    "shown dflash": ("dflash", {"learning_rate": 3e-3}),
    "shown dspark": ("dspark", {"learning_rate": 3e-3, "markov_rank": 64}),
    "headrace": ("headrace", {"learning_rate": 3e-3, "markov_rank": 64}),
}
"""Name: the kind and its options. ``dflash`` and ``dspark`` are as published, the shown ones as ``penstock train`` has
them. All draft every token; all have two layers but EAGLE and EAGLE-3, which have one, and Medusa, which has none."""
BY_LEVEL: Final = ("shown dspark", "headrace")
"""Drafters whose pass gives several levels, which are also drafted by a pass for each level."""
AMONG: Final = (1, 4, 16)
TREES: Final = (4, 8, 16, 32, 64)
DEPTH: Final = 7
CLUSTER: Final = "spd-4"
DRAFT_MS: Final = 1e-5
"""Milliseconds of a drafter's pass, beside 1 of a stage's: a tree of many levels takes no longer than one of few."""
EPOCHS: Final = 1000
"""More than any number of updates asks for."""


class InFlight:
    """SPD's module as a trainee whose steps are the numbers of tokens in flight before the one asked about."""

    def __init__(self, trainee: SpdTrainee) -> None:
        self.module, self.logits = trainee.module, trainee.logits
        self._trainee = trainee

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        levels = max(self._trainee.levels, key=len)
        for ahead in range(min(steps, len(levels) - 1)):
            blocks = lay_out(levels, ahead + 1, self.module.asking)
            yield self._trainee.hidden(batch, blocks)[0]


class First:
    """A trainee's first steps alone."""

    def __init__(self, trainee: Any, steps: int) -> None:
        self.module, self.logits = trainee.module, trainee.logits
        self._trainee, self._steps = trainee, steps

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        yield from islice(self._trainee.unroll(batch, steps), self._steps)


def options_of(asked: argparse.Namespace, name: str, seed: int) -> TrainOptions:
    """The options of one run."""
    kind, own = RECIPES[name]
    return TrainOptions(
        kind=kind,
        output=with_states(asked.work, folder_of(name, asked.updates, seed)),
        data=(asked.data,),
        epochs=EPOCHS,
        max_steps=asked.updates,
        seed=seed,
        save_every=max(1, asked.updates // 4),
        **COMMON,
        **own,
    )


def folder_of(name: str, updates: int, seed: int) -> str:
    """The name of a drafter's folder in WORK."""
    return f"{name.replace(' ', '-')}-{updates}-{seed}"


def with_states(work: Path, name: str) -> Path:
    """The folder of a run in WORK, whose states lie where those of all runs do."""
    shared, states = work / "states", work / name / "training" / "states"
    shared.mkdir(parents=True, exist_ok=True)
    states.parent.mkdir(parents=True, exist_ok=True)
    if not states.is_symlink():
        states.symlink_to(shared.resolve(), target_is_directory=True)
    return work / name


def measured(asked: argparse.Namespace, sizes: virtual.Sizes, name: str, seed: int) -> dict[str, Any]:
    """Train one drafter, or finish what was begun, and look at it. ``processor_s`` is what this process needed for it,
    the target's states included."""
    torch.set_num_threads(1)  # threads that wait for each other on a busy host would count as work
    options, began = options_of(asked, name, seed), time.process_time()
    drafter = run_train(options, Console(quiet=True))
    seconds = time.process_time() - began
    return {
        "processor_s": round(seconds, 1),
        "bytes": sum(file.stat().st_size for file in options.output.glob("*.safetensors")),
        "in_flight": known(options, drafter),
        "trees": trees(options.output, options.kind, sizes),
        **({"by_level": trees(options.output, options.kind, sizes, ahead=0)} if name in BY_LEVEL else {}),
    }


def known(options: TrainOptions, drafter: Any) -> list[list[float]]:
    """Fractions of the held-out tokens among the best of ``AMONG``, by how many tokens are in flight."""
    setup = set_up(options, Console(quiet=True))
    target, kind = setup.target, setup.kind
    corpus = read_corpus(setup)
    module, _ = kind.files.load(drafter, target, "cpu")
    head = TargetHead(target, options.dtype, "cpu")
    trainee: Any = kind.trainee(module, head, setup.options, target, None)
    if isinstance(trainee, BlockTrainee):
        trainee.shown = IN_FLIGHT
    elif isinstance(trainee, SpdTrainee):
        trainee = InFlight(trainee)
    loader = Loader(corpus, cached_states(setup, corpus), drafter.reads, target.num_layers, "cpu")
    return looked_at(setup.options, corpus, loader, trainee, head)


def looked_at(options: TrainOptions, corpus: Any, loader: Loader, trainee: Any, head: TargetHead) -> list[list[float]]:
    """The same fractions of a trainee whose steps are the numbers of tokens in flight."""
    with torch.autocast("cpu", torch.bfloat16):
        found = held_out(options, corpus, loader, First(trainee, IN_FLIGHT + 1), head)
    return [[round(step[count - 1], 4) for count in AMONG] for step in found.by_step]


def trees(folder: Path, method: str, sizes: virtual.Sizes, **options: int) -> dict[str, list[float]]:
    """Accepted tokens of a tree of each size of ``TREES``, by temperature; ``options`` are the drafter's.

    Trees are verified one after the other, each in the time that a token takes plainly, so that their speed over plain
    decoding is one more than what they hold.
    """
    entries = [f"static_tree[tree_size={size},tree_depth={DEPTH}]" for size in TREES]
    drafter = {"method": method, "model": str(folder), **options}
    runs = virtual.compared(virtual.in_lockstep(CLUSTER, DRAFT_MS), drafter, entries, virtual.asked(sizes))
    found = {}
    for one in (0.0, 1.0):
        plain = virtual.find(runs, PLAIN, one).tokens_per_second
        found[f"T={one:g}"] = [
            round(max(0.0, virtual.find(runs, entry, one).tokens_per_second / plain - 1), 3) for entry in entries
        ]
    return found


Measure = Callable[[argparse.Namespace, virtual.Sizes, str, int], dict[str, Any]]
"""Trains and measures a drafter: the script's options, the sizes of what is asked, a name, and a seed."""


def main(file: str, measure: Measure, how: str, updates: int, names: Sequence[str]) -> None:
    """Run a script by its ``__file__``: each of ``names`` is a case with every seed. ``updates`` is a default."""

    def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
        asked = wanted.options
        for seed in range(asked.seeds):
            for name in asked.only:
                given = partial(measure, asked, wanted.sizes, name, seed)
                yield f"{name}, {asked.updates} updates, seed {seed}", given

    virtual.main(
        file,
        cases,
        how=how,
        given=lambda asked: f"DATA WORK --updates {asked.updates} --seeds {asked.seeds}",
        data=Path,
        work=Path,
        updates=updates,
        seeds=3,
        only=tuple(names),
    )


if __name__ == "__main__":
    main(__file__, measured, HOW, updates=3000, names=tuple(RECIPES))
