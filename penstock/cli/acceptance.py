"""``penstock acceptance``: acceptance rules compared on recorded distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.bench.options import RecordedDraft, RecordedModel
from penstock.cli.command import command, new_app
from penstock.cli.outputs import AsJson
from penstock.options import Option

app = new_app()


@app.command()
@command
def acceptance(
    *,
    files: Annotated[
        tuple[Path, ...], Option("What penstock bench --record wrote.", metavar="FILE...", positional=True)
    ],
    model: RecordedModel = None,
    draft_model: RecordedDraft = None,
    as_json: AsJson = False,
) -> None:
    from penstock.bench.recordings.rules import run_acceptance

    run_acceptance(files, as_json, model=model, draft_model=draft_model)
