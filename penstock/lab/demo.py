"""``penstock demo``: its models and prompts, and its scene on the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.cluster import Cluster, load_cluster, plain_step_seconds, stage_timings
from penstock.cluster.timing import MAX_OVERRUNS
from penstock.core import SamplingParams
from penstock.engine import options
from penstock.engine.completion import Prompt
from penstock.engine.loop import Observer
from penstock.lab.bench.comparison import measure, on_time
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import read_prompts
from penstock.lab.race import PENSTOCK, PLAIN, TITLES, Race
from penstock.library.download import Unreachable
from penstock.library.names import DEFAULT, PAIR
from penstock.library.shelf import place_of, title_of_default
from penstock.pipeline.forkserver import fork_from_here
from penstock.speculation import SpeculativeConfig
from penstock.terminal import FiguresTable
from penstock.text.chat import ChatFormat, chat_prompt
from penstock.text.tokenizer import Tokenizer
from penstock.trace import EMULATED

if TYPE_CHECKING:
    from penstock.engine.scheduler import Advance
    from penstock.requests.request import Request

# ---------------------------------------------------------------------------------------------------------------- scene
# The demo's models and prompts: the small chat model where it can be fetched, else the shipped pair.

STRATEGY: Final = "auto"
"""The strategy that races against the plain pipeline."""
PROMPTS: Final = 2
"""Prompts that are answered twice, plainly and speculating. More take longer than a viewer waits (``TOKENS``)."""
TOKENS: Final = 48
"""Tokens per prompt of the pair: both runs of two prompts, and the start, take three quarters of a minute."""
ANSWER: Final = 96
"""Most tokens of an answer of the chat model. The pair's two texts are as long together."""
CODE: Final = """\
def area(width, height):
    return width * height


def volume(width, height, depth):
    return width * height * depth"""
TEXT: Final = (
    "A penstock is a pipe that carries water from a reservoir to a turbine. The water turns the turbine, and the "
    "turbine drives a generator. When the gate of the penstock is closed, the water stops and the turbine stops "
    "with it."
)
QUESTIONS: Final = (
    f"What does this Python code do? Show it again first.\n\n{CODE}",
    f"Quote what this text says about the turbine.\n\n{TEXT}",
)
"""Prompts whose answers repeat some of the prompt, in which prompt lookup finds drafts."""
CHAT_WORDS: Final = "{} answers greedily; drafts are looked up in the text so far: it repeats itself."
PAIR_WORDS: Final = (
    "The pair that comes with the package continues Python source. Its target has 7 million parameters: the text has "
    "the form of Python and little sense."
)
"""Words about the texts that are shown: the chat model's (with its name), or the pair's."""


@dataclass(frozen=True)
class Scene:
    """The models and prompts of a demo. ``shown`` are the prompts as people see them, ``params`` those of each prompt.

    ``words`` say what is shown.
    """

    model: str
    words: str
    speculation: SpeculativeConfig
    shown: Sequence[str]
    params: Sequence[SamplingParams]
    is_chat: bool = False

    @property
    def quantization(self) -> str:
        """int8 for the chat model: its time grows least with rows, and all boards share this host's cores."""
        from penstock.models.packing import usable

        return "int8" if self.is_chat and usable("int8") else "auto"

    def prompts(self, tokenizer: Tokenizer) -> list[Prompt]:
        """The prompts for the engine, by the chat template for a chat model."""
        if not self.is_chat:
            return list(self.shown)
        asked = ([{"role": "user", "content": text.strip()}] for text in self.shown)
        return [chat_prompt(tokenizer, messages, ChatFormat()) for messages in asked]


def scene_for(console: Console, *, embedded: bool) -> Scene:
    """The pair's scene if ``embedded``, or, with a line that says so, if the chat model cannot be fetched."""
    if embedded:
        return pair_scene()
    try:
        return chat_scene(place_of(DEFAULT, console))
    except Unreachable as error:
        console.print(f"{error}. The demo shows the pair of small models that comes with the package.", soft_wrap=True)
        return pair_scene()


def chat_scene(model: str) -> Scene:
    """The scene of the small chat model, which drafts by prompt lookup."""
    params = [SamplingParams(temperature=0.0, max_tokens=ANSWER)] * len(QUESTIONS)
    speculation = SpeculativeConfig(method="ngram", strategy=STRATEGY)
    words = CHAT_WORDS.format(title_of_default())
    return Scene(model, words, speculation, [f"{text}\n\n" for text in QUESTIONS], params, is_chat=True)


def pair_scene() -> Scene:
    """The scene of the shipped pair.

    It samples, since so small a model repeats itself greedily, and it ignores EOS tokens, so that all texts have the
    same length.
    """
    prompts = read_prompts(options.DEMO / "prompts.jsonl", PROMPTS)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(len(prompts))]
    speculation = SpeculativeConfig(method="draft_model", model=PAIR, strategy=STRATEGY)
    return Scene(PAIR, PAIR_WORDS, speculation, prompts, params)


# ----------------------------------------------------------------------------------------------------------------- show
# ``penstock demo``: the plain pipeline and Penstock write the same text on four emulated boards, side by side.

CLUSTER: Final = "demo"
"""The preset of the four emulated boards."""
BUSY_PACE: Final = 1.05
"""Time of plain tokens, over that of the modelled boards, above which the host is too busy for the figures. A larger
one would show this host's pace as the boards'."""


def run_demo(as_json: bool, *, embedded: bool = False) -> None:
    """Run the demo on this terminal; with ``as_json`` stdout gets one object and nothing else.

    ``embedded``: show the shipped pair, without looking for the chat model.
    """
    cluster = load_cluster(CLUSTER)
    console = Console(stderr=as_json, highlight=False)
    scene = scene_for(console, embedded=embedded)
    fork_from_here()
    live = console.is_terminal and not console.is_dumb_terminal and not as_json
    with (live_screen if live else line_screen)(console, cluster, scene) as screen:
        runs = compare(cluster, scene, screen)
    if as_json:
        print(json.dumps({"model": Path(scene.model).stem, **summary(runs)}))
    else:
        print_report(console, cluster, runs)


def compare(cluster: Cluster, scene: Scene, screen: Race | Lines) -> list[StrategyRun]:
    """Run every prompt through the plain pipeline and then through Penstock, both on the same stages."""
    from penstock.emulation.cluster import RealTimeExecutor
    from penstock.engine.llm import LLM

    strategies = [(PLAIN, None), (PENSTOCK, scene.speculation)]
    with LLM(
        scene.model,
        quantization=scene.quantization,
        cluster=cluster,
        speculative_config=scene.speculation,
        enable_prefix_caching=False,
        host=RealTimeExecutor(),
    ) as llm:
        prompts = scene.prompts(llm.get_tokenizer())
        with on_time(llm):
            return measure(llm, prompts, scene.params, strategies, observer=screen, on_progress=screen.begin)


# ------------------------------------------------------------------------------------------------------------ screens
# The race on a terminal, and lines where there is none.


@contextmanager
def live_screen(console: Console, cluster: Cluster, scene: Scene) -> Iterator[Race]:
    """The race, redrawn some times a second by a thread of its own; its texts remain on the screen at the end.

    On the alternate screen every picture overwrites the one before it: nothing is erased, so nothing flickers.
    """
    race = Race(console, cluster, scene.shown, scene.words)
    with Live(race, console=console, screen=True, refresh_per_second=8):
        yield race
    console.print(race.texts())
    console.print(scene.words)


@contextmanager
def line_screen(console: Console, cluster: Cluster, scene: Scene) -> Iterator[Lines]:
    """Lines about the demo and its runs."""
    console.print(f"Penstock demo. {sentence(cluster.description)} {sentence(EMULATED)}", soft_wrap=True)
    console.print(scene.words, soft_wrap=True)
    console.print(f"Starting {len(cluster.stages)} stages ...")
    yield Lines(console)


class Lines(Observer):
    """Prints a line when a run ends, for a file or a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what = ""
        self._started = 0.0

    def begin(self, strategy: str, index: int, total: int) -> None:
        """Note which run begins."""
        self._what = f"prompt {index + 1} of {total}, {TITLES[strategy]}"
        self._started = time.monotonic()

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        if done.finished is not None:
            self._console.print(f"{self._what}: {request.produced} tokens in {at - self._started:.1f} s")


# ------------------------------------------------------------------------------------------------------------- report
# The figures of both runs, and the signs that they cannot be trusted.


def summary(runs: Sequence[StrategyRun]) -> dict[str, object]:
    """The object that ``--json`` prints: whether the texts are the same, the speed-up, and the figures of both runs."""
    plain, penstock = runs
    return {
        "identical": penstock.identical_to_autoregressive,
        "speedup": speedup(plain, penstock),
        "runs": [run.as_dict() for run in runs],
    }


def speedup(plain: StrategyRun, penstock: StrategyRun) -> float:
    """The speed of one run in proportion to that of the other."""
    return penstock.tokens_per_second / plain.tokens_per_second


def print_report(console: Console, cluster: Cluster, runs: Sequence[StrategyRun]) -> None:
    """Print the table of both runs, and whether their texts are the same."""
    plain, penstock = runs
    step = max(timing.seconds(1) for timing in stage_timings(cluster))
    console.print()
    console.print(table_of(runs))
    if penstock.identical_to_autoregressive:
        console.print(f"[bold green]The same text, token for token, {speedup(plain, penstock):.1f} times as fast.[/]")
    else:
        console.print("[bold red]The texts differ.[/] Please report this: they never should.")
    console.print(
        f"A step is one stage's time, {step * 1e3:.0f} ms: plain, a token needs {len(cluster.stages)} of them in a row."
    )
    console.print(overrun_words(runs))
    if reason := busy_words(cluster, runs):
        console.print(f"[yellow]This host was busy:[/] {reason}. The figures suffer; run it again when less else runs.")


def overrun_words(runs: Sequence[StrategyRun]) -> str:
    """The share of batches and drafts that took longer than modelled, for each run."""
    shares = " and ".join(f"{run.overrun_fraction:.1%} ({TITLES[run.strategy]})" for run in runs)
    return f"Overruns, batches and drafts that took longer here than on a modelled board: {shares}."


def busy_words(cluster: Cluster, runs: Sequence[StrategyRun]) -> str:
    """Signs that the host did not keep up with the modelled boards; empty if there is none."""
    reasons = []
    worst = max(run.overrun_fraction for run in runs)
    if worst > MAX_OVERRUNS:
        reasons.append(f"{worst:.0%} of the batches and drafts took longer than on a modelled board")
    pace = 1.0 / runs[0].tokens_per_second / plain_step_seconds(cluster)
    if pace > BUSY_PACE:
        reasons.append(f"plain tokens took {pace - 1:.0%} longer than the boards need for them")
    return ", and ".join(reasons)


def table_of(runs: Sequence[StrategyRun]) -> Table:
    """A row for each run."""
    plain = runs[0]
    table = FiguresTable("", "tokens/s", "speed-up", "accepted/step", "busy", "same text", title=EMULATED)
    for run in runs:
        table.add_row(
            TITLES[run.strategy],
            f"{run.tokens_per_second:.2f}",
            f"{speedup(plain, run):.2f}x",
            f"{run.tokens_per_stage_time:.2f}",
            f"{sum(run.stage_busy) / len(run.stage_busy):.0%}",
            "-" if run is plain else "yes" if run.identical_to_autoregressive else "NO",
            style="bold" if run is not plain else None,
        )
    return table


def sentence(text: str) -> str:
    """The text as a sentence: a capital letter and a full stop."""
    return text[0].upper() + text[1:] + "."
