"""The worth of each part of Headrace: drafters trained without it, or with another one.

    python -m benchmarks.drafters.ablations DATA WORK [--updates 1000] [--seeds 3] [--only NAME ...]

All drafters are the demo target's, trained on the same steps of 1,024 tokens; a seed decides the same order for all.
``whole`` is what ``penstock train headrace`` has: two layers, five taps, causal in the block, shown up to four tokens
in flight and their states. Without states the module is DSpark's; the causal one that is shown tokens in flight is
measured by ``like_for_like``. ``drawn blocks alone`` leaves out the blocks that show every token
(``BlockTrainee._paths``). Held-out tokens at T = 0 are looked for among the best candidates with 0 to 4 tokens in
flight, which fill a pipeline of one stage more, stand in one of 8 or 16 stages, or have no states yet. ``own head`` has
an output head of its own, which begins as the target's and is trained.

A case that is in benchmarks/measured/drafters/ablations.json is not measured again with as many updates; a run that was
broken off goes on. Weights stay in WORK.
"""

from __future__ import annotations

import argparse
import copy
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import torch
from rich.console import Console

from benchmarks.drafters.like_for_like import looked_at, main, options_of, with_states
from benchmarks.shared import virtual
from penstock.lab.trainer import block
from penstock.lab.trainer.block import BlockTrainee, HeadraceTrainee
from penstock.lab.trainer.loop import Bar, load_state, train
from penstock.lab.trainer.options import IN_FLIGHT
from penstock.lab.trainer.run import (
    STATE,
    cached_states,
    choose_vocabulary,
    fresh_drafter,
    make_run,
    planned,
    read_corpus,
    set_up,
    settings_of,
)
from penstock.lab.trainer.states import Loader
from penstock.models.speculators.base import TargetHead

HOW: Final = "Measured, with the demo target"
HEADRACE: Final = "headrace"
"""The recipe of ``like_for_like`` that all cases begin with."""
WHOLE, HEAD, DRAWN = "whole", "own head", "drawn blocks alone"
CASES: Final[dict[str, dict[str, Any]]] = {
    WHOLE: {},
    DRAWN: {},
    "no states, none shown": {"kind": "dspark", "in_flight": 0},
    "no states, bidirectional": {"kind": "dspark", "bidirectional": True},
    "1 layer": {"spec_layers": 1},
    "4 layers": {"spec_layers": 4},
    "2 taps": {},
    "3 taps": {},
    HEAD: {},
}
"""Name: the options that differ from the recipe's."""
STAGES: Final = {"filled": 0, "8 stages": 8, "16 stages": 16, "none read": 10**9}
"""Name: the number of stages that tokens in flight have to pass at least. With so many, none has any states."""


def measured(asked: argparse.Namespace, _: virtual.Sizes, case: str, seed: int) -> dict[str, Any]:
    """Train a drafter, or finish what was begun, and look at it on held-out text."""
    with ExitStack() as stack:
        if case.endswith("taps"):
            stack.enter_context(patch.object(block, "TAPS", int(case[0])))
        if case == DRAWN:
            stack.enter_context(patch.object(BlockTrainee, "_paths", lambda *_: ()))
        return trained(asked, case, seed)


def trained(asked: argparse.Namespace, case: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    options, console = replace(options_of(asked, HEADRACE, seed), **CASES[case]), Console(quiet=True)
    output = with_states(asked.work, f"ablation {case}-{asked.updates}-{seed}".replace(" ", "-"))
    # The whole is what ``like_for_like`` trains, too: what one has trained the other looks at.
    setup = set_up(options if case == WHOLE else replace(options, output=output), console)
    if case == HEAD:
        setup = replace(setup, kind=replace(setup.kind, trainee=with_head(setup.kind.trainee)))
    corpus = read_corpus(setup)
    vocabulary = choose_vocabulary(setup, corpus)
    settings = settings_of(setup, corpus, vocabulary)
    cache = cached_states(setup, corpus)
    run = make_run(setup, corpus, cache, fresh_drafter(setup, vocabulary, settings), vocabulary, planned(setup, corpus))
    own = {name: one for name, one in run.trainee.named_parameters() if name.startswith("own_head")}
    run = replace(run, parameters={**run.parameters, **own})
    with Bar(console, 0, len(run.steps), setup.kind.shown) as bar:
        train(run, load_state(setup.work / STATE, settings), bar)
    head, trainee = TargetHead(setup.target, options.dtype, "cpu"), run.trainee
    assert isinstance(trainee, BlockTrainee)
    trainee.shown = IN_FLIGHT
    loader = Loader(corpus, cache, setup.kind.reads(setup.options, setup.target), setup.target.num_layers, "cpu")
    found = {}
    for name, stages in STAGES.items() if isinstance(trainee, HeadraceTrainee) else [("filled", 0)]:
        trainee.stages = stages
        found[name] = looked_at(setup.options, corpus, loader, trainee, head)
    return found


def with_head(make: Any) -> Any:
    """The trainee that ``make`` gives, with an output head that is trained, too."""

    def made(module: Any, *arguments: Any) -> BlockTrainee:
        trainee: BlockTrainee = make(module, *arguments)
        trainee.own_head = module.head = copy.deepcopy(module.head).requires_grad_(True)
        return trainee

    return made


if __name__ == "__main__":
    main(__file__, measured, HOW, updates=1000, names=tuple(CASES))
