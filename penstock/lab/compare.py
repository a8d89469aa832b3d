"""``penstock compare A.json B.json``: compares two benches on the questions that both asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.console import Console
from rich.markup import escape

from penstock.config import FieldError, parse
from penstock.core import ConfigError
from penstock.lab.common import CONFIDENCE, Ratio, bounds, paired_ratio
from penstock.terminal import FiguresTable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

if TYPE_CHECKING:
    Config = TypeVar("Config", bound=DataclassInstance)


HEADINGS: Final = ("A", "B", "B / A", f"{CONFIDENCE:.0%} bounds", "pairs")


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """One request of a run: its prompt, its seed, and the seconds that its tokens after the first took."""

    prompt_sha256: str
    seed: int
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """One strategy in one setting, with the fields by which two benches are compared."""

    prompt_set: str
    temperature: float
    strategy: str
    tokens_per_second: float
    requests: tuple[ReadRequest, ...]

    @property
    def key(self) -> tuple[str, float, str]:
        return self.prompt_set, self.temperature, self.strategy

    @property
    def setting(self) -> str:
        return f"{self.prompt_set}, T = {self.temperature:g}"

    def speeds(self) -> dict[tuple[str, int], float]:
        """Tokens per second of each request, by prompt hash and seed."""
        return {
            (one.prompt_sha256, one.seed): one.tokens / one.seconds
            for one in self.requests
            if one.tokens > 0 and one.seconds > 0
        }


@dataclass(frozen=True)
class BenchFile:
    settings: dict[str, Any]
    runs: tuple[ReadRun, ...]


def compare(first: Path, second: Path, console: Console | None = None) -> None:
    """Print the settings that differ and the ratios second / first. Raises ConfigError naming file and field."""
    one, other = read_bench(first), read_bench(second)
    console = console or Console(highlight=False)
    different = differences(one.settings, other.settings) or ["  none"]
    console.print("Settings that differ:", *different, sep="\n", markup=False, soft_wrap=True)
    tables: Sequence[FiguresTable | str] = ratio_tables(one.runs, other.runs)
    for table in tables or ["No setting and strategy is in both."]:
        console.print()
        console.print(table)
    for line in left_over(first, one, other), left_over(second, other, one):
        if line:
            console.print(line, markup=False, soft_wrap=True)


def read_bench(path: Path) -> BenchFile:
    """Read a bench file. Raises ConfigError naming the file, and the required field that is missing or wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    try:
        return bench_file(content)
    except FieldError as error:
        raise ConfigError(f"{path}: is no file of penstock bench: {error}") from None


def bench_file(content: object) -> BenchFile:
    settings = field_of(content, "settings", dict)
    runs = field_of(content, "runs", list)
    return BenchFile(settings, tuple(read_run(run, f"runs[{i}]") for i, run in enumerate(runs)))


def field_of(table: object, name: str, kind: type[Any]) -> Any:
    if not isinstance(table, Mapping) or name not in table:
        raise FieldError(name, "is missing")
    if not isinstance(table[name], kind):
        raise FieldError(name, f"has to be {'a table' if kind is dict else 'a list'}")
    return table[name]


def read_run(run: object, where: str) -> ReadRun:
    table = known(ReadRun, run)
    if isinstance(table, dict) and isinstance(table.get("requests"), list):
        table["requests"] = [known(ReadRequest, one) for one in table["requests"]]
    return parse(ReadRun, table, where)


def known(kind: type[Config], table: object) -> object:
    """The entries of a table for which ``kind`` has fields, since a bench file holds more than is compared."""
    if not isinstance(table, Mapping):
        return table
    names = {field.name for field in dataclasses.fields(kind)}
    return {key: value for key, value in table.items() if key in names}


# ----------------------------------------------------------------------------------------------------------- settings


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """A line for each setting, nested ones included, that differs between the two."""
    one, other = dict(flat(first)), dict(flat(second))
    names = dict.fromkeys([*one, *other])
    return [
        f"  {name}: {one.get(name, '-')} in A, {other.get(name, '-')} in B"
        for name in names
        if one.get(name) != other.get(name)
    ]


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of dotted name and value as JSON."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value)


# ------------------------------------------------------------------------------------------------------------- ratios


def ratio_tables(first: Sequence[ReadRun], second: Sequence[ReadRun]) -> list[FiguresTable]:
    """Tables of B / A in tokens/s for every run that both have, one for each setting.

    A ratio is over the requests that both ran; without any there is none.
    """
    others = {run.key: run for run in second}
    both = [run for run in first if run.key in others]
    tables = []
    for setting in dict.fromkeys(run.setting for run in both):
        table = FiguresTable("strategy", *HEADINGS, title=f"{setting}: tokens/s")
        for run in both:
            if run.setting == setting:
                table.add_row(*map(escape, ratio_cells(run, others[run.key])))
        tables.append(table)
    return tables


def ratio_cells(one: ReadRun, other: ReadRun) -> list[str]:
    ratio = ratio_of(one, other)
    speeds = [f"{run.tokens_per_second:.2f}" for run in (one, other)]
    mean = f"{ratio.mean:.3f}" if ratio else "-"
    return [one.strategy, *speeds, mean, bounds(ratio.bounds if ratio else None), str(ratio.pairs if ratio else 0)]


def ratio_of(one: ReadRun, other: ReadRun) -> Ratio | None:
    """The ratio over the requests (prompt and seed) that both ran, in pairs; None where there are none."""
    before, after = one.speeds(), other.speeds()
    return paired_ratio([after[key] / before[key] for key in before if key in after])


def left_over(path: Path, one: BenchFile, other: BenchFile) -> str:
    """A line that names the runs of the first file that the second lacks; empty if there are none."""
    lacking = {run.key for run in other.runs}
    names = [f"{run.setting}: {run.strategy}" for run in one.runs if run.key not in lacking]
    return f"Only in {path}: {'; '.join(names)}" if names else ""
