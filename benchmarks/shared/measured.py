"""Stores a section's figures in benchmarks/measured/FOLDER/NAME.json."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.shared.root import ROOT
from penstock.core import ConfigError

MEASURED = ROOT / "benchmarks" / "measured"
LOAD = os.getloadavg()[0]
"""Processes that ran or waited as this process began, so that the benchmark's own do not count."""
FIELDS = ("how", "commands", "date", "versions", "figures")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures with what is needed to measure them again: commands, day (ISO) and versions by package.

    ``how`` says whether they are simulated, emulated or measured, and with which drafter. ``notes`` apply to these
    figures only and are dropped when they are measured anew.
    """

    how: str
    commands: Sequence[str]
    date: str
    versions: Mapping[str, str]
    figures: Any
    notes: Sequence[str] = ()
    host: Mapping[str, Any] = field(default_factory=dict)
    """Its processor, its cores, and the processes that ran or waited (the last minute's mean) as the benchmark began;
    older files lack it."""


Taken = tuple[list[str], Any]
"""Commands, and the figures that they gave."""


def stored(name: str) -> Measured:
    """The figures measured last. Raises ConfigError naming the file and the remedy where it is missing or damaged."""
    path = path_of(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {remedy(name)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}; {remedy(name)}") from error
    missing = [field for field in FIELDS if field not in content]
    if missing:
        raise ConfigError(f"{path}: {missing[0]} is missing; {remedy(name)}")
    return Measured(
        **{field: content[field] for field in FIELDS}, notes=content.get("notes", []), host=content.get("host", {})
    )


def store(name: str, how: str, taken: Taken) -> None:
    """Write new figures, with today's date and the installed versions."""
    commands, figures = taken
    today = date.today().isoformat()
    measured = Measured(how=how, commands=commands, date=today, versions=versions(), figures=figures, host=host())
    path = path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(measured))


def write_json(path: Path, content: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)  # an interrupted run leaves the old file or the new one


def kept_figures(name: str) -> dict[str, Any]:
    """The stored figures of a section whose parts are stored one by one; empty where there are none."""
    return dict(stored(name).figures) if path_of(name).exists() else {}


def path_of(name: str) -> Path:
    """The file of a section, in a folder named like its script's, or in ``commands`` for Penstock's own commands."""
    return MEASURED / (folder_of_script(name) or "commands") / f"{name}.json"


def folder_of_script(name: str) -> str | None:
    """The folder of the script that measures a section; None where there is none of its name."""
    folders = sorted(path.parent.name for path in (ROOT / "benchmarks").glob(f"*/{name}.py"))
    return next((folder for folder in folders if folder != "sections"), None)


def remedy(name: str) -> str:
    return f"restore it from the repository, or run: python -m benchmarks.results --measure {name}"


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("penstock", "torch", "transformers")}
    return {"python": platform.python_version(), **packages}


def host() -> dict[str, Any]:
    return {"processor": processor(), "cores": os.cpu_count(), "load": round(LOAD, 2)}


def processor() -> str:
    """The processor's name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return next(iter(named), platform.machine())
