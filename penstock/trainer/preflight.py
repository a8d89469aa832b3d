"""Checks of training options that need no more than a glance at files, before torch is imported."""

from __future__ import annotations

import itertools

from penstock.cluster import Cluster
from penstock.config import FieldError
from penstock.engine.options import model_folder
from penstock.extras import CURVES, TRAINING, require
from penstock.library.reference import read_reference
from penstock.models.glance import glance
from penstock.models.torch_build import check_built_for, check_version
from penstock.simulator.clusters import check_drafter, modelled_cluster
from penstock.trainer.data.corpus import documents_of, files_of
from penstock.trainer.options import TrainOptions, check_within

COUNTED: tuple[str, ...] = ("layers", "spec_layers", "exit_layer", "stages", "anchors")
"""Options that are counts or numbers of the target's layers."""


def check_run(options: TrainOptions) -> None:
    """Raise ConfigError for what is missing, is no data, does not fit the target, or is not installed."""
    for path in options.data:
        for file in files_of(path):
            for _ in itertools.islice(documents_of(file), 1):
                pass
    if options.cluster is not None:
        drafting_cluster(options.cluster)
    check_version()
    check_built_for(options.device)
    if read_reference(options.model) is not None:
        require([TRAINING, CURVES])  # before anything is fetched
    target = glance(model_folder(options.model, "target"))
    check_target(options, target.vocab_size, target.num_layers)
    require([TRAINING, CURVES])


def check_target(options: TrainOptions, vocab_size: int | None, layers: int | None) -> None:
    """Raise FieldError for options that exceed the target's sizes; None stands for a size that is not known."""
    size = options.draft_vocab_size
    if size is not None and vocab_size is not None and size > vocab_size:
        raise FieldError("draft_vocab_size", f"is {size}; the target knows {vocab_size} tokens")
    if layers is not None:
        check_within(options, layers, *COUNTED)


def drafting_cluster(name: str) -> Cluster:
    """An emulated cluster with a place for the drafter. Raises ConfigError for any other."""
    cluster = modelled_cluster(name)
    check_drafter(cluster)
    return cluster
