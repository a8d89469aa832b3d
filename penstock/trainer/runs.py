"""Puts a run together for the loop: module, target's head, data and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from penstock.core import ConfigError
from penstock.models.speculators.loader import TargetHead
from penstock.trainer.data.batches import Loader, epoch_steps, packed
from penstock.trainer.data.cache import StateCache
from penstock.trainer.data.corpus import Corpus
from penstock.trainer.data.vocabulary import Vocabulary
from penstock.trainer.evaluate import Acceptance, estimated_speedup, evaluate
from penstock.trainer.kinds.base import Drafter
from penstock.trainer.loop import Run, Step
from penstock.trainer.options import TrainOptions
from penstock.trainer.setup import STATE, Setup

HELD_OUT_TOKENS: Final = 1 << 14
"""Most tokens that each evaluation looks at."""


def make_run(
    setup: Setup,
    corpus: Corpus,
    cache: StateCache,
    fresh: Drafter,
    vocabulary: Vocabulary,
    steps: Sequence[Step],
) -> Run:
    """Put module, target's head and data together."""
    options, kind, target, device = setup.options, setup.kind, setup.target, setup.accelerator.device
    rate = options.learning_rate
    assert rate is not None
    module, parameters = kind.files.load(fresh, target, str(device))
    head = TargetHead(target, options.dtype, str(device))
    trainee = kind.trainee(module, head, options, target, vocabulary.ids_v).to(device)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    loader = Loader(corpus, cache, kind.reads(options, target), target.num_layers, device)

    def judge() -> tuple[Acceptance, float | None]:
        found = held_out(options, corpus, loader, trainee, head)
        profile = found.profile if kind.shown.alike else found.by_step[0]
        return found, None if setup.cluster is None else estimated_speedup(profile, setup.cluster)

    return Run(
        setup.accelerator,
        kind,
        trainee,
        parameters,
        loader,
        steps,
        rate,
        options.dtype == "bfloat16",
        options.seed,
        options.save_every,
        setup.work / STATE,
        judge,
    )


def planned(setup: Setup, corpus: Corpus) -> list[Step]:
    """All optimiser steps. Raises ConfigError if the data do not suffice for one."""
    options = setup.options
    parts = options.accumulate * setup.accelerator.num_processes
    steps: list[Step] = []
    for epoch in range(options.epochs):
        steps += epoch_steps(corpus, options.seed, epoch, options.batch_tokens, parts)
    if not steps:
        raise ConfigError(f"data: {len(corpus.training)} sequences are fewer than the {parts} parts of one step")
    return steps[: options.max_steps]


def held_out(options: TrainOptions, corpus: Corpus, loader: Loader, trainee: Any, head: nn.Module) -> Acceptance:
    """Figures on held-out samples, evenly selected where there are too many."""
    tokens = sum(len(corpus.samples[i]) for i in corpus.held_out)
    chosen = corpus.held_out[:: max(1, -(-tokens // HELD_OUT_TOKENS))]
    batches = packed(chosen, corpus.samples, options.batch_tokens // options.accumulate)
    found: Acceptance = evaluate(trainee, head, map(loader.batch, batches))
    return found
