"""Loads a learned drafter as the stage of a pipeline of its own."""

from __future__ import annotations

from typing import Final

from penstock.models.checkpoint import open_checkpoint
from penstock.models.quantization.pack import pack
from penstock.models.speculators.base import Kind
from penstock.models.speculators.eagle_stage import EagleStage
from penstock.models.speculators.formats import open_speculator
from penstock.models.speculators.loader import load_speculator
from penstock.models.speculators.medusa_stage import MedusaStage
from penstock.models.speculators.reader import FeatureReader
from penstock.models.speculators.spd_stage import SpdStage
from penstock.models.stage_model import grammars_of

STAGES: Final[dict[Kind, type[FeatureReader]]] = {
    "eagle": EagleStage,
    "eagle3": EagleStage,
    "early_exit": SpdStage,
    "medusa": MedusaStage,
    "mtp": EagleStage,
    "spd": SpdStage,
}


def load_speculator_stage(
    path: str, target: str, *, capacity: int, dtype: str, device: str, quantization: str = "none"
) -> FeatureReader:
    """The learned drafter in folder (or hub id) ``path`` for the model in ``target``, with ``capacity`` slots.

    ``quantization`` is "none" or a format of ``quantization.pack``. Raises ConfigError if the two do not belong
    together.
    """
    model = open_checkpoint(target)
    checkpoint = open_speculator(path, model)
    module = load_speculator(checkpoint, model, dtype, device)
    pack(module, quantization)
    stage = STAGES[checkpoint.kind](module, checkpoint.reads, model.hidden_size, capacity, dtype, device)
    stage.grammars = grammars_of(model)
    return stage
