"""Runs ``penstock`` as a user would, from the repository's folder."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.root import ROOT

BIN = Path(sys.executable).parent


def with_json_file(arguments: Sequence[str]) -> tuple[str, Any]:
    """Run ``penstock ARGUMENTS`` from the repository's folder. Returns its command line, and the content of ``--json
    FILE``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        penstock([*arguments, "--json", str(path)])
        return command_line(arguments), json.loads(path.read_text(encoding="utf-8"))


def with_json_output(arguments: Sequence[str]) -> tuple[str, Any]:
    """Run a command whose ``--json`` prints the figures. Returns its command line and the figures."""
    return command_line([*arguments, "--json"]), json.loads(penstock([*arguments, "--json"]))


def penstock(arguments: Sequence[str]) -> str:
    """The output of the command. Raises CalledProcessError where it fails."""
    done = subprocess.run([str(BIN / "penstock"), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def command_line(arguments: Sequence[str]) -> str:
    return shlex.join(["penstock", *arguments])
