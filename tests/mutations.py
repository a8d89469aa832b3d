"""Small mistakes in the core, drawn with a seed, each of which the short suite has to catch.

python -m tests.mutations draw 42           # five a part of the core, into tests/mutations.jsonl; verdicts are emptied
python -m tests.mutations run               # those without a verdict, each against the tests of its part
python -m tests.mutations run --survivors   # those that no test has caught, against all unit tests without processes
python -m tests.mutations table             # the verdicts, as a table

A mutation is applied to a copy of the checkout, never to the checkout. One that changes no behaviour has the reason in
``equivalent``, written by hand.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).parents[1]
STORED: Final = ROOT / "tests" / "mutations.jsonl"
PER_PART: Final = 5
"""Mutations of each part of the core."""
MOST_CPU_S: Final = 120
"""Seconds of processor time after which a mutation counts as caught: it has made a test compute for ever. On a busy
machine all tests take longer by the clock, and that must not catch anything."""
MOST_TEST_S: Final = 300
"""Seconds after which a test fails: the mutation has made it wait for ever. No test takes a tenth of them."""
LIMIT_S: Final = 3600
"""Seconds after which all tests of a mutation end, and it counts as caught."""
ENDLESS: Final = "a test that no longer ends"


class Part(msgspec.Struct, frozen=True):
    """A part of the core: its files under ``penstock/``, and the tests under ``tests/unit/`` that hold it."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


PARTS: Final = {
    "strategies": Part(
        tuple(f"strategies/{name}.py" for name in ("auto", "flowspec", "pipedec")),
        ("strategies",),
    ),
    "commit": Part(
        ("engine/scheduler.py", "tree.py"), ("test_tree.py", "engine/test_loop.py", "engine/test_histories.py")
    ),
    "visibility": Part(("stage/visibility.py",), ("stage/test_visibility.py", "stage/test_near.py")),
    "slots": Part(("requests/slots.py",), ("requests",)),
    "sampler": Part(
        ("stage/sampler.py", "noise.py"),
        ("stage/test_processors.py", "stage/test_sampler.py", "stage/test_narrowed_picks.py", "test_noise.py"),
    ),
    "framing": Part(
        ("transport/addresses.py", "transport/inbox.py", "transport/outbox.py"),
        ("transport/test_framing.py", "transport/test_inbox.py", "transport/test_outbox.py"),
    ),
    "loader": Part(
        ("models/loader.py", "checkpoint/tensors.py"),
        (
            "models/test_loader.py",
            "models/test_own_part.py",
            "models/test_hostile_checkpoints.py",
            "models/test_files_as_they_are.py",
            "checkpoint/test_read_progress.py",
            "checkpoint/test_grouped.py",
        ),
    ),
    "recovery": Part(("engine/recovery.py",), ("engine/test_recovery.py", "engine/test_moving.py")),
}

SWAPPED: Final = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
    ast.And: (" and ", " or "),
    ast.Or: (" or ", " and "),
    ast.Add: (" + ", " - "),
    ast.Sub: (" - ", " + "),
    ast.Mult: (" * ", " / "),
    ast.Div: (" / ", " * "),
}
"""Operator -> its text, and the text of the one that takes its place."""
NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
"""Functions that are called by mistake for each other."""


class Mutation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One changed line of a file under ``penstock/``."""

    part: str
    file: str
    line: int
    """Number of the line when it was drawn; it is found again by its text."""
    before: str
    after: str
    occurrence: int = 0
    """How many equal lines stand above it in the file."""
    caught_by: str = ""
    """The first test that has failed; "nothing" if none has; empty before it has been tried."""
    equivalent: str = ""
    """Why the change makes no difference that a caller can see; empty if it makes one."""


NOTHING: Final = "nothing"


# ---------------------------------------------------------------------------------------------------------------- drawn


def edits(source: str) -> Iterator[tuple[int, str]]:
    """Each small mistake as (line number, the line with it), in the order of the source."""
    lines = source.splitlines()
    for node in executed(ast.parse(source)):
        for first, end, text in replacements(node):
            number = first[0]
            if number == end[0]:
                # ast counts columns in bytes.
                octets = lines[number - 1].encode()
                segment = octets[first[1] : end[1]].decode()
                old, new = text
                if segment.count(old) == 1:
                    changed = octets[: first[1]].decode() + segment.replace(old, new) + octets[end[1] :].decode()
                    yield number, changed


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide something: no annotation, message of an error, assertion or line of the log."""
    if isinstance(tree, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom) or is_log(tree):
        return
    yield tree
    for name, value in ast.iter_fields(tree):
        if name not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from executed(child)


def is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("log.")


Place = tuple[int, int]
"""Line and column."""


def replacements(node: ast.AST) -> Iterator[tuple[Place, Place, tuple[str, str]]]:
    """The segments of a node in which a text is to be replaced by another: (from, to, (text, other text))."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in SWAPPED:
            yield end_of(left), start_of(right), SWAPPED[type(operator)]
        case ast.BoolOp(operator, [left, right, *_]) | ast.BinOp(left, operator, right) if type(operator) in SWAPPED:
            yield end_of(left), start_of(right), SWAPPED[type(operator)]
        case ast.AugAssign(target, ast.Add() | ast.Sub() as operator, value):
            signs = ("+=", "-=") if isinstance(operator, ast.Add) else ("-=", "+=")
            yield end_of(target), start_of(value), signs
        case ast.UnaryOp(ast.Not(), operand):
            yield start_of(node), start_of(operand), ("not ", "")
        case ast.Constant(bool() as value):
            yield start_of(node), end_of(node), (str(value), str(not value))
        case ast.Constant(int() as value):
            yield start_of(node), end_of(node), (str(value), str(value + 1))
        case ast.Call(ast.Name(name) as function) if name in NAMES:
            yield start_of(function), end_of(function), (name, NAMES[name])
        case ast.Continue():
            yield start_of(node), end_of(node), ("continue", "break")
        case ast.Break():
            yield start_of(node), end_of(node), ("break", "continue")
        case ast.Expr(ast.Call()) | ast.Delete():
            yield start_of(node), end_of(node), (ast.unparse(node), "pass")


def start_of(node: ast.AST) -> Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def end_of(node: ast.AST) -> Place:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def draw(seed: int, per_part: int = PER_PART) -> list[Mutation]:
    """The same mutations for the same seed and source: ``per_part`` for each part, in the order of files and lines."""
    found: list[Mutation] = []
    for name, part in PARTS.items():
        every = [mutation for file in part.files for mutation in mutations_of(name, file)]
        chosen = sorted(random.Random(f"{seed} {name}").sample(range(len(every)), per_part))
        found += [every[place] for place in chosen]
    return found


def mutations_of(part: str, file: str) -> Iterator[Mutation]:
    source = (ROOT / "penstock" / file).read_text("utf-8")
    lines = source.splitlines()
    for number, changed in edits(source):
        before = lines[number - 1]
        above = lines[: number - 1].count(before)
        yield Mutation(part=part, file=file, line=number, before=before, after=changed, occurrence=above)


# ---------------------------------------------------------------------------------------------------------------- tried


def apply(mutation: Mutation, source: str) -> str:
    """The source with the mistake. Raises LookupError if the line is no longer there."""
    lines = source.splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.rstrip("\n") == mutation.before]
    if len(places) <= mutation.occurrence:
        raise LookupError(f"{mutation.file} has no line {mutation.before.strip()!r} any more: draw the mutations anew")
    lines[places[mutation.occurrence]] = mutation.after + "\n"
    return "".join(lines)


def try_out(mutation: Mutation, copy: Path, tests: Sequence[str]) -> str:
    """The first test that fails with the mutation in the ``copy`` of the checkout, or ``NOTHING``."""
    file = copy / "penstock" / mutation.file
    source = file.read_text("utf-8")
    file.write_text(apply(mutation, source), "utf-8")
    try:
        return first_failure(copy, tests)
    finally:
        file.write_text(source, "utf-8")


def first_failure(copy: Path, tests: Sequence[str]) -> str:
    """The test of the ``copy`` that fails first, or ``NOTHING``."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not processes and not whole", "-p", "no:cacheprovider"]
    # A signal fails one test by name, where the suite's own method would end pytest.
    command += ["-o", f"timeout={MOST_TEST_S}", "-o", "timeout_method=signal", "--hypothesis-seed=0", *tests]
    # No stale bytecode: a file that is changed back within a second looks the same to Python.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    bounded = partial(resource.setrlimit, resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            preexec_fn=bounded,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ENDLESS
    if done.returncode == 0:
        return NOTHING
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed and done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return ENDLESS
    if not failed:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0]


def run(mutations: list[Mutation], survivors: bool) -> None:
    """Try out what has no verdict, or the ``survivors``, and store each verdict as soon as it is there."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=hidden)
        for mutation in mutations:
            if mutation.caught_by == (NOTHING if survivors else "") and not mutation.equivalent:
                tests = ["tests/unit"] if survivors else [f"tests/unit/{name}" for name in PARTS[mutation.part].tests]
                mutation.caught_by = try_out(mutation, copy, tests)
                print(f"{mutation.file}:{mutation.line} {mutation.after.strip()} -> {mutation.caught_by}", flush=True)
                store(mutations)


def load() -> list[Mutation]:
    return [msgspec.json.decode(line, type=Mutation) for line in STORED.read_bytes().splitlines()]


def store(mutations: Sequence[Mutation]) -> None:
    STORED.write_bytes(b"".join(msgspec.json.encode(mutation) + b"\n" for mutation in mutations))


def table(mutations: Sequence[Mutation]) -> str:
    """The verdicts as a table of Markdown."""
    rows = [f"| `{one.file}` | `{one.before.strip()}` | `{one.after.strip()}` | {verdict(one)} |" for one in mutations]
    return "\n".join(["| file | line | with the mistake | caught by |", "| --- | --- | --- | --- |", *rows])


def verdict(mutation: Mutation) -> str:
    return f"no difference: {mutation.equivalent}" if mutation.equivalent else mutation.caught_by


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw").add_argument("seed", type=int)
    commands.add_parser("run").add_argument("--survivors", action="store_true")
    commands.add_parser("table")
    given = parser.parse_args()
    if given.command == "draw":
        store(draw(given.seed))
    elif given.command == "run":
        run(load(), given.survivors)
    else:
        print(table(load()))


if __name__ == "__main__":
    main()
