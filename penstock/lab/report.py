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
from penstock.core import ConfigError, __version__, from_json
from penstock.files import naming
from penstock.terminal import FiguresTable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)


# -------------------------------------------------------------------------------------------------------------- formats
# Formats of numbers in tables, "-" for a missing one, and tables as Markdown.


def share(value: float | None) -> str:
    """A share from 0 to 1 in per cent."""
    return "-" if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    """A ratio: ``1.80x``."""
    return "-" if value is None else f"{value:.2f}x"


def length(value: float | None) -> str:
    """A mean number of tokens."""
    return "-" if value is None else f"{value:.2f}"


def bounds(interval: Sequence[float] | None) -> str:
    """The two bounds of an interval."""
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def is_text(cell: str) -> bool:
    """Whether a table's cell is a word or code, and no figure or sign that stands for one."""
    return cell[:1] == "`" or (cell[:1].isalpha() and cell != "NA")


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its numbers aligned right. Headings lose their line breaks."""
    joined = [heading.replace("-\n", "").replace("\n", " ") for heading in headings]
    texts = (any(is_text(row[i]) for row in rows) for i in range(1, len(headings)))
    aligned = ["---", *("---" if text else "---:" for text in texts)]
    lines = [joined, aligned, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ------------------------------------------------------------------------------------------------------------ intervals
# Confidence bounds of a ratio measured in pairs, and of a share.

CONFIDENCE: Final = 0.95
"""Probability, 0 to 1, with which bounds hold the true value. It is the field's usual level."""


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of ``pairs`` ratios, with its bounds at ``CONFIDENCE``; None for the bounds of a single pair."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def bounds(self) -> list[float] | None:
        """Both bounds, or None."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def paired_ratio(ratios: Sequence[float]) -> Ratio | None:
    """The geometric mean of paired ratios, with Student's t interval of the mean of their logarithms; None for none.

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
    """Student's t at the upper end of the interval, for ``freedom`` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def share_bounds(found: int, of: int) -> tuple[float, float]:
    """Wilson's score interval (1927) of the share ``found`` / ``of``, 0 to 1; ``of`` is at least 1."""
    z, share = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), found / of
    centre = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return (centre - half) / scale, (centre + half) / scale


# -------------------------------------------------------------------------------------------------------------- looping
# Detects outputs that have fallen into a loop: they would flatter every drafter.


def is_looping(token_ids: Sequence[int], longest: int = 16, times: int = 3) -> bool:
    """Whether the output ends in a phrase of at most ``longest`` tokens that is repeated at least ``times`` times.

    The repetitions have to be twelve tokens at least, so that a row of equals signs or blanks does not count.
    """
    for length in range(1, longest + 1):
        count = max(times, -(-12 // length))
        tail = list(token_ids[-length * count :])
        if len(tail) == length * count and tail == tail[:length] * count:
            return True
    return False


# --------------------------------------------------------------------------------------------------------------- report
# The outcome of a command, printed, or written as JSON and as a page.


@dataclass(frozen=True)
class Report:
    """A command's outcome. ``document`` is written as JSON; its entry ``settings`` states how to repeat the run.

    ``headlines`` are sentences above the tables, ``remarks`` the sentences that a reader needs before quoting them.
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
            with naming(file):
                file.write_text(indented(self.document), encoding="utf-8")

    def answer(self, console: Console, to: TextIO | None = None) -> None:
        """Print the report; with ``to`` write only its document there, on one line."""
        if to is None:
            self.show(console)
        else:
            to.write(json.dumps(self.document) + "\n")

    def write_folder(self, folder: Path, command: str, title: str, body: Iterable[str]) -> None:
        """Write the document, and report.md with headlines, remarks, ``body`` and settings, into an existing folder.

        ``body`` are paragraphs in Markdown; plots may be drawn as they are iterated over, so the document comes first.
        """
        name = f"{command}.json"
        with naming(folder / name):
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
        with naming(folder / "report.md"):
            (folder / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def indented(document: Mapping[str, Any]) -> str:
    """A document as the text of a JSON file."""
    return json.dumps(document, indent=2) + "\n"


# ------------------------------------------------------------------------------------------------------------- settings
# The settings by which a run can be repeated.


def settings_of(
    options: DataclassInstance, without: Collection[str], packages: Sequence[str] = (), **other: Any
) -> dict[str, Any]:
    """The options without those in ``without``, then ``other``, which replaces options, and the packages' versions."""
    shown = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in without}
    return {**shown, **other, "versions": {"penstock": __version__} | {name: version(name) for name in packages}}


def this_host() -> dict[str, Any]:
    """Python's version, the number of cores and the architecture of this host, for the settings of a bench."""
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}


def settings_table(settings: Mapping[str, Any]) -> str:
    """The settings as a table in Markdown."""
    rows = [(f"`{key}`", cell(value)) for key, value in settings.items()]
    return markdown(("setting", "value"), rows)


def cell(value: Any) -> str:
    """A setting's value in that table: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else f"`{json.dumps(value)}`"


# -------------------------------------------------------------------------------------------------------------- figures
# Tables of figures, a line for each run.

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""The functions that format a run's figures, by heading; headings have line breaks, so that columns are narrow."""


def figures_table(
    names: str,
    title: str | None,
    columns: Columns[T],
    runs: Iterable[tuple[str, T]],
    always: frozenset[str] = frozenset(),
) -> FiguresTable:
    """A table with a line for each of ``runs``, pairs of a name and a run. ``always``: see FiguresTable."""
    table = FiguresTable(names, *columns, title=title, always=always)
    for name, run in runs:
        table.add_row(escape(name), *(cell(run) for cell in columns.values()))
    return table


def figures_rows(columns: Columns[T], runs: Iterable[tuple[str, T]]) -> list[list[str]]:
    """The lines of a table in Markdown; names are written as code."""
    return [[f"`{name}`", *(cell(run) for cell in columns.values())] for name, run in runs]


# --------------------------------------------------------------------------------------------------------------- folder
# The folder of a report.

Image = tuple[str, str]
"""The name of a file in the report's folder, and its description."""


def prepare(folder: Path) -> None:
    """Make the report's folder. Raises ConfigError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"report: {folder} cannot be made: {error.strerror}") from error


def shown(image: Image) -> str:
    """The image as Markdown."""
    name, words = image
    return f"![{words}]({quote(name)})"


# -------------------------------------------------------------------------------------------------------------- compare
# ``penstock compare A.json B.json``: two benches, compared on the questions that both asked.

HEADINGS: Final = ("A", "B", "B / A", f"{CONFIDENCE:.0%} bounds", "pairs")
"""The headings of its tables, after the strategy's."""


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """One request of a run: its prompt's hash and its seed, and tokens and seconds after the first token."""

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
        """The key under which the other bench has the same run."""
        return self.prompt_set, self.temperature, self.strategy

    @property
    def setting(self) -> str:
        """The run's setting in words."""
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
    """A file of ``penstock bench``, as far as it is compared."""

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


def consoles(console: Console | None) -> tuple[Console, Console]:
    """Where a command shows its progress, and where its report: standard error and output, or ``console`` for both."""
    return (console, console) if console is not None else (Console(stderr=True), Console(highlight=False))


def read_bench(path: Path) -> BenchFile:
    """Read a file of ``penstock bench``. Raises ConfigError naming the file, and a field that is missing or wrong."""
    try:
        content = from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    try:
        return bench_file(content)
    except FieldError as error:
        raise ConfigError(f"{path}: is no file of penstock bench: {error}") from None


def bench_file(content: object) -> BenchFile:
    """The settings and the runs in a file's content. Raises FieldError, naming the field, for other content."""
    settings = field_of(content, "settings", dict)
    runs = field_of(content, "runs", list)
    return BenchFile(settings, tuple(read_run(run, f"runs[{i}]") for i, run in enumerate(runs)))


def field_of(table: object, name: str, kind: type[Any]) -> Any:
    """The entry ``name`` of a table. Raises FieldError unless it is of the type ``kind``."""
    if not isinstance(table, Mapping) or name not in table:
        raise FieldError(name, "is missing")
    if not isinstance(table[name], kind):
        raise FieldError(name, f"has to be {'a table' if kind is dict else 'a list'}")
    return table[name]


def read_run(run: object, where: str) -> ReadRun:
    """A run of a file; ``where`` is its path in the file. Raises FieldError for a field missing or of another type."""
    table = known(ReadRun, run)
    if isinstance(table, dict) and isinstance(table.get("requests"), list):
        table["requests"] = [known(ReadRequest, one) for one in table["requests"]]
    return parse(ReadRun, table, where)


def known(kind: type[Config], table: object) -> object:
    """The entries of a table that are fields of ``kind``: a bench file has more than is compared."""
    if not isinstance(table, Mapping):
        return table
    names = {field.name for field in dataclasses.fields(kind)}
    return {key: value for key, value in table.items() if key in names}


# ----------------------------------------------------------------------------------------------------------- settings
# Settings that differ.


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """A line for each setting that differs, settings within settings included."""
    one, other = dict(flat(first)), dict(flat(second))
    names = dict.fromkeys([*one, *other])
    return [
        f"  {name}: {one.get(name, '-')} in A, {other.get(name, '-')} in B"
        for name in names
        if one.get(name) != other.get(name)
    ]


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The settings as pairs: the path with dots, and the value as JSON."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value)


# ------------------------------------------------------------------------------------------------------------- ratios
# Speeds of the second bench in proportion to the first.


def ratio_tables(first: Sequence[ReadRun], second: Sequence[ReadRun]) -> list[FiguresTable]:
    """Tables of B / A in tokens per second, one for each setting, for every run that is in both benches.

    A ratio is over the requests that both ran; there is none if they share no request.
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
    """A line of the table: the strategy, both speeds, their ratio with its bounds, and the number of pairs."""
    ratio = ratio_of(one, other)
    speeds = [f"{run.tokens_per_second:.2f}" for run in (one, other)]
    mean = f"{ratio.mean:.3f}" if ratio else "-"
    return [one.strategy, *speeds, mean, bounds(ratio.bounds if ratio else None), str(ratio.pairs if ratio else 0)]


def ratio_of(one: ReadRun, other: ReadRun) -> Ratio | None:
    """The ratio over the requests (prompt and seed) that both ran, in pairs; None if there is no such request."""
    before, after = one.speeds(), other.speeds()
    return paired_ratio([after[key] / before[key] for key in before if key in after])


def left_over(path: Path, one: BenchFile, other: BenchFile) -> str:
    """A line that names the runs of the file ``one`` that ``other`` lacks; "" if it has all."""
    lacking = {run.key for run in other.runs}
    names = [f"{run.setting}: {run.strategy}" for run in one.runs if run.key not in lacking]
    return f"Only in {path}: {'; '.join(names)}" if names else ""
