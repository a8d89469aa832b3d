"""Benchmarks in parts: each part is a process of its own with its share of the time, and has a file of figures.

A part writes its file anew with every figure. One that overruns is killed, and loses what it had not written; one that
fails is named. The other parts lose nothing, and what a part leaves of its time goes to those after it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.measured import write_json
from benchmarks.shared.root import ROOT
from penstock import __version__
from penstock.files import scratch_folder

RUNNING, ENDED, FAILED, OVERRAN, LEFT_OUT = "running", "ended", "failed", "overran", "left out"
"""Outcomes of a part. A file that says ``running`` after the benchmark's end is of one that was killed itself."""
SHARED: Final = "BENCHMARK_SHARED"
"""The environment variable with a part's ``shared_folder``."""
LEAST_S: Final = 5.0
"""Seconds of time below which a part is not begun: its imports alone take about as long."""
GONE_S: Final = 10.0
"""Seconds within which all processes of a killed part have to be gone."""
MOST_OF_AN_ERROR: Final = 2000
"""Characters of a part's last output that are kept where it ended without a word of its own."""
APART: Final = {"PENSTOCK_FORGET": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""Environment of parts: nothing that an engine learns reaches another part, and nothing asks the network."""


class DoesNotFit(Exception):
    """Raised for what a device, a host or the time has no room for. It is left out, and that is no failure."""


@dataclass(frozen=True)
class Part:
    """A part by name. ``measure`` ("module:function") is imported in the part's own process, and called with the
    command's options and the ``Findings``."""

    name: str
    measure: str
    weight: float
    """Share of the time, relative to the weights of the other parts."""
    lines: Callable[[Mapping[str, Any]], Iterator[str]]
    """Sums up its figures for the terminal."""

    def function(self) -> Callable[[argparse.Namespace, Findings], None]:
        module, _, name = self.measure.partition(":")
        found: Callable[[argparse.Namespace, Findings], None] = getattr(importlib.import_module(module), name)
        return found


@dataclass
class Findings:
    """The figures of a part, in its file as soon as they are added.

    ``failed`` has the errors, and ``left_out`` the reasons, of what within the part has no figures, by name.
    """

    file: Path
    stated: Mapping[str, Any]
    """The head of the file: part, command, day, versions."""
    ends: float
    """Moment (``time.monotonic``) at which the part is killed."""
    figures: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.ends - time.monotonic()

    def add(self, name: str, figures: Any) -> None:
        self.figures[name] = figures
        self.write(RUNNING)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Go on after an error in the block, which is kept under ``name``."""
        try:
            yield
        except DoesNotFit as reason:
            self.left_out[name] = str(reason)
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = described(error)
        self.write(RUNNING)

    def need(self, seconds: float) -> None:
        """Raise DoesNotFit unless so many seconds are left."""
        if self.left < seconds:
            raise DoesNotFit(f"takes about {seconds:.0f} s, and {max(0.0, self.left):.0f} s were left")

    def write(self, outcome: str, error: str | None = None) -> None:
        found = {"figures": self.figures, "failed": self.failed, "left_out": self.left_out}
        write_json(self.file, {**self.stated, "outcome": outcome, "error": error, **found})


def shared_folder() -> Path:
    """A folder that all parts of a run share, for what one of them makes and others need; it goes with the run."""
    return Path(os.environ[SHARED])


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def versions() -> dict[str, str]:
    """Versions of Python and of what figures depend on. Penstock itself may run from its folder, uninstalled."""
    found = {"python": platform.python_version(), "penstock": __version__}
    for package in ("torch", "transformers", "triton"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


# --------------------------------------------------------------------------------------------------- the command line


def parts_parser(module: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks in parts have."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where each part's JSON file goes")
    parser.add_argument("--seconds", type=float, default=530.0, help="for all parts together (default: 530)")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: shows that every part works here")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these parts alone")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # set in a part's own process
    return parser


def run(
    module: str,
    parser: argparse.ArgumentParser,
    parts_of: Callable[[argparse.Namespace], Sequence[Part]],
    arguments: Sequence[str] | None,
) -> int:
    """Run the parts of the benchmark ``python -m module``, or in a part's process that part. Returns an exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    parts = parts_of(options)
    names = [part.name for part in parts]
    for name in (*options.only, *([options.part] if options.part else [])):
        if name not in names:
            parser.error(f"{name!r} is no part; there are {', '.join(names)}")
    command = f"{parser.prog} {shlex.join(given)}"
    if options.part:
        asked = command.partition(" --part ")[0]
        return run_here(next(part for part in parts if part.name == options.part), options, asked)
    options.out.mkdir(parents=True, exist_ok=True)
    return run_all(module, given, [part for part in parts if part.name in (options.only or names)], options)


def run_here(part: Part, options: argparse.Namespace, command: str) -> int:
    """Measure a part in this process, which the benchmark has started for it."""
    ends = time.monotonic() + options.seconds
    stated = {"part": part.name, "command": command, "date": date.today().isoformat(), "versions": versions()}
    findings = Findings(path_of(options, part), stated, ends)
    findings.write(RUNNING)
    try:
        part.function()(options, findings)
    except DoesNotFit as reason:
        findings.write(LEFT_OUT, str(reason))
    except Exception as error:
        traceback.print_exc()
        findings.write(FAILED, described(error))
    else:
        findings.write(ENDED)
    return 0


def path_of(options: argparse.Namespace, part: Part) -> Path:
    return Path(options.out) / f"{part.name}.json"


# ------------------------------------------------------------------------------------------------- one after the other


def run_all(module: str, given: Sequence[str], parts: Sequence[Part], options: argparse.Namespace) -> int:
    """Run each part, print what it found, and sum up. Returns 1 if one did not end well, else 0."""
    began = time.monotonic()
    outcomes: dict[str, str] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running part is killed, too
    with scratch_folder() as shared:
        for number, part in enumerate(parts):
            left = began + options.seconds - time.monotonic()
            share = left * part.weight / sum(one.weight for one in parts[number:])
            path_of(options, part).unlink(missing_ok=True)
            started = time.monotonic()
            if share < LEAST_S:
                early = ended_early(part, LEFT_OUT, f"only {max(0.0, share):.1f} s were left")
                write_json(path_of(options, part), early)
            else:
                run_apart(module, given, part, share, options, shared)
            told = json.loads(path_of(options, part).read_text(encoding="utf-8"))
            told |= {"seconds": round(time.monotonic() - started, 2), "share_s": round(share, 2)}
            write_json(path_of(options, part), told)
            outcomes[part.name] = told["outcome"]
            print("\n".join(report(part, told)), flush=True)
    print(summed_up(outcomes, time.monotonic() - began, options.out))
    return int(any(outcome != ENDED for outcome in outcomes.values()))


def run_apart(
    module: str, given: Sequence[str], part: Part, share: float, options: argparse.Namespace, shared: Path
) -> None:
    """Run a part in a process of its own, which is killed after ``share`` seconds."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *given, "--part", part.name, "--seconds", f"{share:.2f}"]
    # A part's temporary files, gigabytes of drawn weights perhaps, go with this folder also after a kill.
    with scratch_folder() as folder:
        environment = {**os.environ, **APART, "PYTHONPATH": search, "TMPDIR": str(folder), SHARED: str(shared)}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=share)
        except subprocess.TimeoutExpired:
            kill(process)
            finish(part, options, OVERRAN, f"killed after {share:.0f} s")
            return
        except BaseException:
            kill(process)
            finish(part, options, OVERRAN, "killed with the benchmark")
            raise
    if process.returncode or not path_of(options, part).exists():
        last = said.decode(errors="replace")[-MOST_OF_AN_ERROR:].strip()
        finish(part, options, FAILED, f"its process ended with status {process.returncode}: {last}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a part's process, and wait for those that it has started.

    Stages end with the process that made them. Each holds the end of the pipe to which its errors go, so that the pipe
    ends when the last one is gone.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GONE_S)


def finish(part: Part, options: argparse.Namespace, outcome: str, error: str) -> None:
    """Write down how a part ended that could not do so itself; its figures stay."""
    file = path_of(options, part)
    told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else ended_early(part, outcome, error)
    write_json(file, told | {"outcome": outcome, "error": error})


def ended_early(part: Part, outcome: str, error: str) -> dict[str, Any]:
    """The content of a part's file where it has found nothing."""
    stated = {"part": part.name, "date": date.today().isoformat(), "versions": versions()}
    return {**stated, "outcome": outcome, "error": error, "figures": {}, "failed": {}, "left_out": {}}


# ----------------------------------------------------------------------------------------------------- for the terminal


def report(part: Part, told: Mapping[str, Any]) -> Iterator[str]:
    """A part's outcome, its figures in short, and what has none."""
    why = f": {told['error']}" if told["error"] else ""
    yield f"{part.name}: {told['outcome']} ({told['seconds']:.0f} of {told['share_s']:.0f} s){why}"
    if told["figures"]:
        yield from (f"  {line}" for line in part.lines(told["figures"]))
    for kind in ("failed", "left_out"):
        for name, reason in told[kind].items():
            yield f"  {kind.replace('_', ' ')}: {name}: {reason.splitlines()[0] if reason else 'no reason given'}"


def summed_up(outcomes: Mapping[str, str], seconds: float, folder: Path) -> str:
    counts = {outcome: [name for name, one in outcomes.items() if one == outcome] for outcome in outcomes.values()}
    ended = len(counts.pop(ENDED, []))
    others = "".join(f"; {outcome}: {', '.join(names)}" for outcome, names in counts.items())
    return f"{ended} of {len(outcomes)} parts ended well, in {seconds:.0f} s{others}. Figures: {folder}/PART.json"
