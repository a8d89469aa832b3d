"""Loads a learned drafter as the stage of a pipeline of its own."""

from __future__ import annotations

from penstock.models.checkpoint import open_checkpoint
from penstock.models.speculators.eagle_stage import EagleStage
from penstock.models.speculators.formats import open_speculator
from penstock.models.speculators.loader import load_speculator
from penstock.models.speculators.medusa_stage import MedusaStage


def load_speculator_stage(
    path: str, target: str, *, capacity: int, dtype: str, device: str
) -> EagleStage | MedusaStage:
    """The learned drafter in folder (or hub id) ``path`` for the model in ``target``, with ``capacity`` slots.

    Raises ConfigError where the two do not belong together.
    """
    model = open_checkpoint(target)
    checkpoint = open_speculator(path, model)
    module = load_speculator(checkpoint, model, dtype, device)
    stage = MedusaStage if checkpoint.kind == "medusa" else EagleStage
    return stage(module, checkpoint.reads, model.hidden_size, capacity, dtype, device)
