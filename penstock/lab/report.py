"""Reports of benches: formats of numbers, intervals, tables of a command, and the comparison of two benches."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.config import FieldError, parse
from penstock.core import ConfigError, __version__
from penstock.terminal import FiguresTable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)


# -------------------------------------------------------------------------------------------------------------- formats
# Formats numbers for tables, and tables as Markdown.


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def length(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def bounds(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; headings lose their line breaks."""
    joined = [heading.replace("-\n", "").replace("\n", " ") for heading in headings]
    lines = [joined, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ------------------------------------------------------------------------------------------------------------ intervals
# Confidence bounds of a ratio measured in pairs, and of a share.

CONFIDENCE: Final = 0.95
"""Probability with which bounds hold the true value."""


@dataclass(frozen=True)
class Ratio:
    """A geometric mean and its bounds at ``CONFIDENCE``; the bounds are None for a single pair."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def bounds(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def paired_ratio(ratios: Sequence[float]) -> Ratio | None:
    """The geometric mean of paired ratios with Student's t interval of the mean of their logarithms; None without any.

    Ratios are averaged geometrically because the mean then does not depend on which side is called the baseline
    (Fleming and Wallace, 1986). A t interval of the logarithms keeps its coverage at the few prompts of a bench, where
    a bootstrap's is too narrow (Georges, Buytaert and Eeckhout, "Statistically Rigorous Java Performance Evaluation",
    OOPSLA 2007, use it below 30 measurements). Pairs are taken as independent of each other.
    """
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, 1)
    half = quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def quantile(freedom: int) -> float:
    """Student's t at the upper end of the interval, for this many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def share_bounds(found: int, of: int) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share; ``of`` is at least 1."""
    z, share = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), found / of
    centre = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return (centre - half) / scale, (centre + half) / scale


# -------------------------------------------------------------------------------------------------------------- looping
# Detects outputs that fell into a loop, which flatters every drafter.


def is_looping(token_ids: Sequence[int], longest: int = 16, times: int = 3) -> bool:
    """Whether the output ends in one phrase of at most ``longest`` tokens, repeated ``times`` times or more.

    At least twelve tokens must repeat, so that a row of equals signs or blanks does not count.
    """
    for length in range(1, longest + 1):
        count = max(times, -(-12 // length))
        tail = list(token_ids[-length * count :])
        if len(tail) == length * count and tail == tail[:length] * count:
            return True
    return False


# --------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Report:
    """A command's outcome. ``document`` is written as JSON; its entry ``settings`` says how to repeat the run.

    ``headlines`` are sentences above the tables, and ``remarks`` those that a reader needs before quoting the tables.
    """

    document: Mapping[str, Any]
    tables: Sequence[Table]
    remarks: Sequence[str] = ()
    headlines: Sequence[str] = ()

    def show(self, console: Console) -> None:
        """Print headlines, tables and remarks."""
        for sentence in self.headlines:
            console.print(sentence, style="bold", highlight=False, markup=False)
        for table in self.tables:
            console.print(table)
        for line in self.remarks:
            console.print(line, highlight=False, markup=False)

    def deliver(self, console: Console, file: Path | None = None) -> None:
        """Print the report, and write its document to ``file`` if there is one."""
        self.show(console)
        if file is not None:
            file.write_text(indented(self.document), encoding="utf-8")

    def answer(self, console: Console, to: TextIO | None = None) -> None:
        """Print the report, or with ``to`` its document alone, on one line."""
        if to is None:
            self.show(console)
        else:
            to.write(json.dumps(self.document) + "\n")

    def write_folder(self, folder: Path, command: str, title: str, body: Iterable[str]) -> None:
        """Write the document, and report.md with headlines, remarks, ``body`` and settings, into an existing folder.

        ``body`` are paragraphs in Markdown. They may be drawn while they are asked for: the document is written first.
        """
        name = f"{command}.json"
        (folder / name).write_text(indented(self.document), encoding="utf-8")
        text = [
            f"# {title}",
            *(f"**{sentence}.**" for sentence in self.headlines),
            f"By `penstock {command}`; all figures, per request too, are in [{name}]({name}).",
            *("- " + line for line in self.remarks),
            *body,
            "## Settings",
            settings_table(self.document["settings"]),
        ]
        (folder / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def indented(document: Mapping[str, Any]) -> str:
    """A document as the text of a JSON file."""
    return json.dumps(document, indent=2) + "\n"


# ------------------------------------------------------------------------------------------------------------- settings


def settings_of(
    options: DataclassInstance, without: Collection[str], packages: Sequence[str] = (), **other: Any
) -> dict[str, Any]:
    """The options but those named in ``without``, with ``other`` in place of or behind them, and packages' versions."""
    shown = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in without}
    return {**shown, **other, "versions": {"penstock": __version__} | {name: version(name) for name in packages}}


def this_host() -> dict[str, Any]:
    """The Python, the number of cores and the architecture of the host that a bench ran on, for its settings."""
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}


def settings_table(settings: Mapping[str, Any]) -> str:
    rows = [(f"`{key}`", cell(value)) for key, value in settings.items()]
    return markdown(("setting", "value"), rows)


def cell(value: Any) -> str:
    return value if isinstance(value, str) else f"`{json.dumps(value)}`"


# -------------------------------------------------------------------------------------------------------------- figures

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""The function that formats a run's figure, by heading; headings are broken into lines to keep columns narrow."""


def figures_table(
    names: str,
    title: str | None,
    columns: Columns[T],
    runs: Iterable[tuple[str, T]],
    always: frozenset[str] = frozenset(),
) -> FiguresTable:
    """A line for each of ``runs``, which are pairs of a name and a run. ``always``: see FiguresTable."""
    table = FiguresTable(names, *columns, title=title, always=always)
    for name, run in runs:
        table.add_row(escape(name), *(cell(run) for cell in columns.values()))
    return table


def figures_rows(columns: Columns[T], runs: Iterable[tuple[str, T]]) -> list[list[str]]:
    """The lines of a table in Markdown, whose names are set as code."""
    return [[f"`{name}`", *(cell(run) for cell in columns.values())] for name, run in runs]


# --------------------------------------------------------------------------------------------------------------- folder

Image = tuple[str, str]
"""A file's name in the report's folder, and its description."""


def prepare(folder: Path) -> None:
    """Make the report's folder. Raises ConfigError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"report: {folder} cannot be made: {error.strerror}") from error


def shown(image: Image) -> str:
    name, words = image
    return f"![{words}]({quote(name)})"


# -------------------------------------------------------------------------------------------------------------- compare
# ``penstock compare A.json B.json``: compares two benches on the questions that both asked.

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
