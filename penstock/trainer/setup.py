"""The setup that all steps of ``penstock train`` share, checked and settled before anything is read."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from penstock.cluster import Cluster
from penstock.config import FieldError
from penstock.engine.options import model_folder
from penstock.models.checkpoint import Checkpoint, open_checkpoint
from penstock.models.devices import check_device
from penstock.trainer.kinds.base import Kind, with_usual
from penstock.trainer.kinds.registry import KINDS
from penstock.trainer.options import TrainOptions
from penstock.trainer.preflight import check_target, drafting_cluster

STATE: Final = "state.pt"
FRESH: Final = "fresh-"


@dataclass(frozen=True)
class Setup:
    """The objects that all steps of the command need, with settled options. ``work`` is the output's folder
    ``training``."""

    options: TrainOptions
    kind: Kind
    target: Checkpoint
    cluster: Cluster | None
    work: Path
    accelerator: Any
    console: Console
    """The main process's console; those of other processes print nothing."""


def set_up(options: TrainOptions, console: Console) -> Setup:
    """Check and settle the options. Raises ConfigError for what is missing or cannot be used here."""
    from accelerate import Accelerator

    check_device(options.device)
    target = open_checkpoint(model_folder(options.model, "target"))
    check_target(options, target.vocab_size, target.num_layers)
    kind = KINDS[options.kind]
    options = with_usual(kind.settle(options, target), learning_rate=kind.learning_rate)
    cluster = None if options.cluster is None else drafting_cluster(options.cluster)
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="no")
    least = options.max_length * options.accumulate * accelerator.num_processes
    if options.batch_tokens < least:
        raise FieldError(
            "batch_tokens", f"is {options.batch_tokens}; for {accelerator.num_processes} processes at least {least}"
        )
    work = options.output / "training"
    if accelerator.is_main_process:
        work.mkdir(parents=True, exist_ok=True)
        if options.restart:
            (work / STATE).unlink(missing_ok=True)
            for fresh in work.glob(f"{FRESH}*"):
                shutil.rmtree(fresh)
    accelerator.wait_for_everyone()
    shown = console if accelerator.is_main_process else Console(quiet=True)
    return Setup(options, kind, target, cluster, work, accelerator, shown)
