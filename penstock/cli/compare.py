"""``penstock compare``: the results of two benches, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.options import Option

app = new_app()


@app.command()
@command
def compare(
    *,
    first: Annotated[
        Path, Option("What 'penstock bench --json' or --report wrote.", metavar="A.json", positional=True)
    ],
    second: Annotated[Path, Option("The same of another bench.", metavar="B.json", positional=True)],
) -> None:
    from penstock.bench.compare import compare as show

    show(first, second)
