"""The import arrows: what each part of the package may know of the others, held by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

import penstock
from tests.sources import tree_of

ROOT = Path(penstock.__file__).parent
BENCHMARKS = ROOT.parent / "benchmarks"

LAYERS = [
    "core",
    "files",
    "config",
    "environment",
    "terminal",
    "noise",
    "tree",
    "messages",
    "transport",
    "cluster",
    "planner",
    "text",
    "outlines",
    "estimates",
    "strategies",
    "stage",
    "emulation",
    "checkpoint",
    "models",
    "library",
    "pipeline",
    "hosts",
    "requests",
    "drafters",
    "speculation",
    "emulation.cluster",
    "engine",
    "trace",
    "clients",
    "lab",
    "server.settings",
    "server.http",
    "server.openai",
    "server.live",
    "server",
    "ray_serve",
    "run",
    "cli",
]
"""A module may import its own line and those above."""

APART = ("server.openai", "server.live")
"""Neither imports the other."""

HEAVY = {"torch", "transformers", "safetensors", "huggingface_hub"}
MAY_BE_HEAVY = ("checkpoint", "models", "stage.tensors", "stage.sampler", "lab.trainer")
LIGHT = ("lab.trainer.options", "lab.trainer.corpus", "checkpoint.look", "checkpoint.gguf_header")
"""Modules of these parts that the command line needs for its help and to refuse what cannot work."""
HEAVY_WHEN_CALLED = {
    "checkpoint.look",
    "files",
    "hosts.probe",
    "hosts.weights",
    "lab.bench.peer_worker",
    "library.download",
    "library.names",
    "library.shelf",
    "lab.record",
    "pipeline.engine_end",
    "pipeline.forking",
    "text.tokenizer",
}

DECISIONS = (
    "core",
    "tree",
    "planner",
    "outlines",
    "estimates",
    "strategies",
    "requests",
    "stage.visibility",
    "stage.driver",
    "emulation.device",
    "drafters",
    "speculation",
)
DECISIONS += tuple(f"engine.{name}" for name in ("scheduler", "loop", "replicas.router"))
OUTSIDE_WORLD = {"time", "datetime", "socket", "ssl", "asyncio", "threading", "subprocess", "multiprocessing", "os"}


MAY_EMULATE = (
    *("emulation", "lab"),
    *("pipeline.base", "pipeline.engine_end", "pipeline.worker"),
    *("engine.resolve", "engine.build"),
)
"""Modules that put an engine's parts together, real or emulated, and those that measure emulated engines."""


@dataclass(frozen=True)
class Import:
    """``when``: at import of the module, when a function is called, or for the type checker only."""

    importer: str
    imported: str
    when: Literal["at once", "when called", "for types"]


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(ROOT.rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        yield name, tree_of(file)


def imports_of(name: str, node: ast.AST, when: str = "at once") -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{name}: relative imports are not used here"
            base = child.module or ""
            for alias in child.names:
                yield Import(name, in_package(f"{base}.{alias.name}", base), when)  # type: ignore[arg-type]
        elif isinstance(child, ast.Import):
            yield from (Import(name, alias.name, when) for alias in child.names)  # type: ignore[arg-type]
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imports_of(name, child, "for types")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and when == "at once":
            yield from imports_of(name, child, "when called")
        else:
            yield from imports_of(name, child, when)


def in_package(full: str, base: str) -> str:
    """``from penstock.stage import tensors`` imports a module, ``from penstock.tree import Node`` does not."""
    path = ROOT.joinpath(*full.split(".")[1:])
    is_module = full.startswith("penstock.") and (path.is_dir() or path.with_suffix(".py").is_file())
    return full if is_module else base


@cache
def imports() -> list[Import]:
    """Every import of the package. They are read by the first test that asks, not by whoever collects the tests."""
    return [found for name, tree in modules() for found in imports_of(name, tree)]


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer(module: str) -> int:
    fitting = [name for name in LAYERS if under(module, name)]
    assert fitting, f"{module}: add it to LAYERS"
    return LAYERS.index(max(fitting, key=len))


def test_every_module_has_its_layer() -> None:
    for name, _ in modules():
        if name:
            layer(name)


def test_the_layout_page_lists_them_in_this_order() -> None:
    page = (ROOT.parent / "docs" / "background" / "architecture.md").read_text(encoding="utf-8")
    block = page.split("## Layout\n")[1].split("```\n")[1].splitlines()[1:]
    listed = [line.split()[0].removesuffix("/").removesuffix(".py") for line in block if not line.startswith(" ")]
    assert listed == list(dict.fromkeys(name.split(".")[0] for name in LAYERS))


def test_imports_point_upwards() -> None:
    wrong = []
    for found in imports():
        own = found.imported.removeprefix("penstock").lstrip(".")
        if not under(found.imported, "penstock") or found.when == "for types" or not found.importer:
            continue
        if own and layer(own) > layer(found.importer):
            wrong.append(found)
    assert wrong == []


def test_the_servers_wings_stand_apart() -> None:
    def wing(module: str) -> str | None:
        return next((name for name in APART if under(module.removeprefix("penstock."), name)), None)

    between = [(wing(found.importer), wing(found.imported), found) for found in imports()]
    assert [found for own, other, found in between if own and other and own != other] == []


def test_the_package_itself_imports_the_core_only() -> None:
    own = [found for found in imports() if not found.importer and under(found.imported, "penstock")]
    assert {found.imported for found in own if found.when == "at once"} == {"penstock.core"}


def test_the_laboratory_is_the_command_lines_alone() -> None:
    importers = {found.importer for found in imports() if under(found.imported, "penstock.lab")}
    assert {name for name in importers if not under(name, "lab") and not under(name, "cli")} == set()


def may_be_heavy(module: str) -> bool:
    return module not in LIGHT and any(under(module, part) for part in MAY_BE_HEAVY)


def test_torch_and_its_kin_stay_where_tensors_are() -> None:
    heavy = [found for found in imports() if found.imported.split(".")[0] in HEAVY and found.when != "for types"]
    elsewhere = [found for found in heavy if not may_be_heavy(found.importer)]
    assert [found for found in elsewhere if found.when == "at once"] == []
    assert {found.importer for found in elsewhere} == HEAVY_WHEN_CALLED


def test_nobody_else_loads_torch_by_importing_who_does() -> None:
    """A module that does not hold tensors itself imports those that do when it is called, not at once."""
    reached = [
        found
        for found in imports()
        if found.when == "at once"
        and not may_be_heavy(found.importer)
        and may_be_heavy(found.imported.removeprefix("penstock."))
    ]
    assert reached == []


def test_typer_is_the_command_lines_alone() -> None:
    """Users of the engine, of a client or of a bench from Python need no option parser."""
    importers = {found.importer for found in imports() if found.imported.split(".")[0] == "typer"}
    assert {name for name in importers if not under(name, "cli")} == {"run", "server.command"}


def test_an_engine_at_work_knows_nothing_of_emulation() -> None:
    knowing = {found.importer for found in imports() if under(found.imported, "penstock.emulation")}
    assert [name for name in sorted(knowing) if not any(under(name, part) for part in MAY_EMULATE)] == []


@pytest.mark.parametrize("part", DECISIONS)
def test_decisions_know_no_clock_and_no_socket(part: str) -> None:
    outside = [
        found for found in imports() if under(found.importer, part) and found.imported.split(".")[0] in OUTSIDE_WORLD
    ]
    assert outside == []


def import_graph(folder: Path, prefix: str = "") -> dict[str, set[str]]:
    """For each module in ``folder`` the others there that it imports anywhere, for types only or in a call too."""
    files = {prefix + ".".join(file.relative_to(folder).with_suffix("").parts): file for file in folder.rglob("*.py")}
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph = {}
    for name, file in files.items():
        imported: set[str] = set()
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                imported |= {member if member in files else node.module for member in members}
        graph[name] = (imported & files.keys()) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules that all reach each other."""
    reached = {name: reachable(name, graph) for name in graph}
    around = {frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in graph}
    return [set(circle) for circle in around if len(circle) > 1]


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_module_waits_for_itself() -> None:
    assert circles(import_graph(ROOT, "penstock.")) == []
    assert circles(import_graph(BENCHMARKS, "benchmarks.")) == []


def test_benchmarks_share_downwards() -> None:
    """The page's sections import scripts, scripts what they share; never the other way."""
    order = ["benchmarks.shared", "", "benchmarks.sections", "benchmarks.results"]

    def level(module: str) -> int:
        return next((i for i, part in enumerate(order) if part and under(module, part)), 1)

    graph = import_graph(BENCHMARKS, "benchmarks.")
    assert {(one, other) for one, others in graph.items() for other in others if level(other) > level(one)} == set()


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"g"}, "g": {"e"}}
    assert sorted(map(sorted, circles(graph))) == [["b", "c"], ["e", "f", "g"]]


def test_this_test_sees_what_it_should() -> None:
    tree = ast.parse(
        "import a\nif TYPE_CHECKING:\n    import b\nclass C:\n    import c\n    def f(self):\n        import d"
    )
    found = {(one.imported, one.when) for one in imports_of("x", tree)}
    assert found == {("a", "at once"), ("b", "for types"), ("c", "at once"), ("d", "when called")}
    assert Import("pipeline.worker", "penstock.transport.inbox", "at once") in imports()
