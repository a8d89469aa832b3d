"""``penstock trace``: where the time of a traced run went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.cli.outputs import AsJson
from penstock.options import Option

app = new_app()


@app.command()
@command
def trace(
    *,
    file: Annotated[Path, Option("What penstock generate --trace FILE wrote.", metavar="FILE", positional=True)],
    as_json: AsJson = False,
) -> None:
    from penstock.trace.show import show_trace

    show_trace(file, as_json)
