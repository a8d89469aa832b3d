"""Loads recordings that a command line names, and checks the models that they were made with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.engine.options import model_folder
from penstock.models.glance import glance
from penstock.recording import Fingerprint, Recording, fingerprint


def load_recordings(files: Sequence[Path], model: str | None, draft_model: str | None) -> list[Recording]:
    """All recordings, or none: raises ConfigError naming a file that is no recording or one of other models.

    ``model`` and ``draft_model`` are named as in docs/reference/models.md; None accepts files made with any model.
    """
    for name, part in ((model, "target"), (draft_model, "draft")):
        if name is not None:
            glance(model_folder(name, part))
    recordings = [Recording.load(file) for file in files]
    target, draft = fingerprint_of(model, "target"), fingerprint_of(draft_model, "draft")
    for file, recording in zip(files, recordings, strict=True):
        recording.check_made_with(file, target, draft)
    return recordings


def fingerprint_of(model: str | None, part: str) -> Fingerprint | None:
    """The model's fingerprint, None for None. Raises ConfigError for a model that is missing or not supported."""
    if model is None:
        return None
    from penstock.models.checkpoint import open_checkpoint

    return fingerprint(model, open_checkpoint(model_folder(model, part)).path)
