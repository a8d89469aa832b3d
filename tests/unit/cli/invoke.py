"""The command line as a user types it."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from penstock.cli.app import app


def invoke(*arguments: str, stdin: str | None = None, width: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(arguments), input=stdin)
