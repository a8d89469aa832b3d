"""The training loop: its state on disk, progress and curves, evaluation, and the loop itself."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from penstock.cluster import Cluster
from penstock.core import ConfigError
from penstock.lab.plots import Labels, Line, plot_lines
from penstock.lab.report import paired_ratio
from penstock.lab.script import profile_script
from penstock.lab.simulator import simulate
from penstock.lab.trainer.kinds import Kind, Shown, Trainee
from penstock.lab.trainer.states import Batch, Loader
from penstock.speculation import SpeculativeConfig
from penstock.terminal import progress_bar

# ---------------------------------------------------------------------------------------------------------------- state
# The state of a run as one file, which is replaced atomically.
#
# Everything random is drawn from seed and step (the order of the data from seed and epoch), so that no generator has a
# state to store.


@dataclass(frozen=True)
class Entry:
    """Figures at one saved step: the mean loss since the last one, and shares of the held-out tokens.

    ``by_step`` is that of ``Acceptance``; it is empty in processes that do not evaluate.
    """

    step: int
    loss: float
    by_step: tuple[tuple[float, ...], ...]
    speedup: float | None = None


@dataclass
class State:
    """The state after ``step`` optimiser steps. ``settings`` identify the run to which the state belongs."""

    settings: Mapping[str, Any]
    step: int = 0
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    history: list[Entry] = field(default_factory=list)


def save_state(state: State, file: Path) -> None:
    """Write the state, so that the file holds the last state or this one, whenever the process is killed."""
    unfinished = file.with_suffix(".unfinished")
    history = [[entry.step, entry.loss, entry.by_step, entry.speedup] for entry in state.history]
    content = {
        "settings": json.dumps(state.settings),
        "step": state.step,
        "weights": dict(state.weights),
        "optimizer": dict(state.optimizer),
        "history": json.dumps(history),
    }
    with unfinished.open("wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)


def load_state(file: Path, settings: Mapping[str, Any]) -> State:
    """The state in ``file``; a fresh one without a file. Raises ConfigError for a run with other settings."""
    if not file.is_file():
        return State(settings)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"output: {file} is damaged; begin anew with --restart") from error
    held, asked = json.loads(content["settings"]), json.loads(json.dumps(settings))
    different = [name for name in asked if held.get(name) != asked[name]]
    if different:
        was = ", ".join(f"{name} {held.get(name)!r}" for name in different)
        now = ", ".join(f"{name} {asked[name]!r}" for name in different)
        raise ConfigError(f"output: {file.parent} holds a run with {was}, not {now}; use another folder, or --restart")
    history = [
        Entry(step, loss, tuple(map(tuple, by_step)), speedup)
        for step, loss, by_step, speedup in json.loads(content["history"])
    ]
    return State(held, content["step"], content["weights"], content["optimizer"], history)


# --------------------------------------------------------------------------------------------------------------- curves
# A run's curves as PNG files.

CANDIDATES: Final = (1, 4, 16)
"""Numbers of candidates for which acceptance is drawn and printed."""


def draw(history: Sequence[Entry], folder: Path, shown: Shown) -> None:
    """Plot loss, acceptance by candidates, and acceptance by step, over the optimiser's steps: three files."""
    steps = [entry.step for entry in history]
    losses: dict[str, Line] = {"loss": ([entry.loss for entry in history], None, None)}
    plot_lines(steps, losses, Labels("Training loss", "step", "nats per token"), folder / "loss.png")
    best = {f"best {count}": shares(history, 0, count) for count in CANDIDATES}
    title = "Held-out tokens among the drafter's candidates, T = 0"
    plot_lines(steps, best, Labels(title, "step", "share"), folder / "acceptance.png")
    deep = {f"{shown.name} {k + shown.first}": shares(history, k, 1) for k in range(len(history[-1].by_step))}
    title = f"Held-out tokens drafted first, {shown.meaning}"
    plot_lines(steps, deep, Labels(title, "step", "share"), folder / f"{shown.name}s.png")


def shares(history: Sequence[Entry], step: int, count: int) -> Line:
    """Acceptance of one step among so many candidates, at each saved state."""
    lines = [entry.by_step[step] for entry in history]
    return [line[min(count, len(line)) - 1] for line in lines], None, None


# ------------------------------------------------------------------------------------------------------------- progress
# The output of a run: a bar with the remaining time, and a line for each saved state.

AVERAGED_OVER: Final = 30.0
"""Seconds over which the remaining time is averaged: all steps take about the same."""


def progress(console: Console) -> Progress:
    """A progress bar for a run."""
    return progress_bar(console, AVERAGED_OVER)


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bar:
    """A run's progress bar, with the loss of the last steps and the last figures on held-out data."""

    def __init__(self, console: Console, done: int, steps: int, shown: Shown) -> None:
        self._console = console
        self._shown = shown
        self._steps = steps
        self._progress = progress(console)
        self._task = self._progress.add_task("training", total=steps, completed=done)
        self._loss = math.nan
        self._figures = ""

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def stepped(self, step: int, loss: float) -> None:
        """Show the steps done, and a running mean of the loss."""
        self._loss = loss if math.isnan(self._loss) else 0.95 * self._loss + 0.05 * loss
        self._progress.update(self._task, completed=step, description=f"loss {self._loss:.3f}{self._figures}")

    def evaluated(self, entry: Entry) -> None:
        """Show the figures, and print a line about them."""
        if entry.by_step:
            self._figures = f", {figures(entry, self._shown)}"
            say(self._console, f"step {entry.step} of {self._steps}: loss {entry.loss:.3f}{self._figures}")


def figures(entry: Entry, shown: Shown) -> str:
    """Held-out acceptance in words: of the first step by candidates, then of each step, and the estimated speed-up."""
    first = entry.by_step[0]
    among = "/".join(f"{first[min(count, len(first)) - 1]:.1%}" for count in CANDIDATES)
    chain = " ".join(f"{shares[0]:.0%}" for shares in entry.by_step)
    gain = "" if entry.speedup is None else f", about {entry.speedup:.2f}x plain decoding (simulated)"
    counts = "/".join(map(str, CANDIDATES))
    return f"held-out tokens among the best {counts}: {among}, by {shown.name} {chain}{gain}"


# ------------------------------------------------------------------------------------------------------------- evaluate
# The acceptance of a drafter in training, on held-out data at T = 0, and an estimate of its gain on a cluster.

MOST_CANDIDATES: Final = 16
"""Most candidates of a position among which the target's token is sought. A profile of so many is what drafts are
simulated with (``simulator.DEMO_ACCURACY``)."""
CHAIN: Final = 7
"""Greatest number of steps ahead that are evaluated. EAGLE-3's module is unrolled for as many by default
(``options.TTT_STEPS``)."""
REQUESTS: Final = 4
"""Requests that are simulated for an estimate."""
TOKENS: Final = 100
"""Tokens of each simulated request. More of both give a steadier estimate, and make each evaluation longer."""


@dataclass(frozen=True)
class Acceptance:
    """Shares of the held-out tokens, 0 to 1; ``by_step[k][c]``: the token of step k is among the c + 1 best candidates.

    The earlier tokens of a chain are those of the text, whether they would have been drafted or not.
    """

    by_step: tuple[tuple[float, ...], ...]
    drafts: tuple[int, ...]
    """The number of tokens evaluated in each step."""

    @property
    def profile(self) -> tuple[float, ...]:
        """Acceptance by candidates, all tokens weighted alike: a full pipeline drafts at every depth equally often."""
        columns = zip(*self.by_step, strict=True)
        return tuple(sum(s * n for s, n in zip(c, self.drafts, strict=True)) / sum(self.drafts) for c in columns)


@torch.no_grad()
def evaluate(trainee: Trainee, head: nn.Module, batches: Iterable[Batch]) -> Acceptance:
    """Look for the target's best token among the drafter's candidates. ``head``: the target's."""
    hits: list[Tensor] = []
    drafts: list[int] = []
    for batch in batches:
        learned_Bn = batch.learned_Bn
        with torch.autocast(learned_Bn.device.type, enabled=False):
            best_Bn = torch.full_like(batch.tokens_Bn, -1)
            best_Bn[learned_Bn] = head(batch.final_BnD[learned_Bn]).argmax(-1)
        for step, hidden in enumerate(trainee.unroll(batch, CHAIN)):
            # A step's output belongs to the last rows only: the first ones have no chain of that length.
            first = learned_Bn.shape[1] - hidden.shape[1]
            learned = learned_Bn[:, first:]
            logits_mV = trainee.logits(step, hidden[learned])
            ranked = logits_mV.topk(min(MOST_CANDIDATES, logits_mV.shape[1])).indices
            found = (ranked == best_Bn[:, first:][learned][:, None]).sum(0)
            if step == len(hits):
                hits.append(torch.zeros_like(found))
                drafts.append(0)
            hits[step] += found
            drafts[step] += len(logits_mV)
    counted = [(one, of) for one, of in zip(hits, drafts, strict=True) if of]
    shares = tuple(tuple((one.cumsum(0) / of).clamp(max=1).tolist()) for one, of in counted)
    return Acceptance(shares, tuple(of for _, of in counted))


def estimated_speedup(accuracy: Sequence[float], cluster: Cluster) -> float:
    """The speed-up over plain decoding, simulated with drafts of this profile and the default strategy.

    The drafter takes the time that the cluster's file states.
    """
    script = profile_script(accuracy, REQUESTS, TOKENS, seed=0)
    speculation = SpeculativeConfig(method="synthetic", accuracy=tuple(accuracy))
    found, plain = simulate(cluster, script, speculation), simulate(cluster, script, None)
    ratio = paired_ratio([base.seconds / one.seconds for one, base in zip(found, plain, strict=True)])
    assert ratio is not None
    return ratio.mean


# ----------------------------------------------------------------------------------------------------------------- loop
# The training loop: the gradients of a step's parts, a step of the optimiser, and now and then figures and state.

WARM_UP: Final = 100
"""Steps over which the learning rate rises; at most a tenth of the run. Adam's average of squared gradients, over 20
steps or more by the kinds' ``betas``, has then forgotten where it began."""

Step = Sequence[Sequence[int]]
"""The samples of each part of an optimiser step, by their numbers."""


class Watch(Protocol):
    """Is told of every step and every evaluation."""

    def stepped(self, step: int, loss: float) -> None: ...

    def evaluated(self, entry: Entry) -> None: ...


@dataclass(frozen=True)
class Run:
    """The parts of a run. ``judge`` evaluates the drafter on held-out data."""

    accelerator: Any
    kind: Kind
    trainee: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """The trained parameters by name."""
    loader: Loader
    steps: Sequence[Step]
    learning_rate: float
    half: bool
    """Whether bfloat16 autocast is on. Accelerate's own switch is not used: it is one for the whole process."""
    seed: int
    save_every: int
    state_file: Path
    judge: Callable[[], tuple[Acceptance, float | None]]


def train(run: Run, state: State, watch: Watch) -> State:
    """Train from ``state`` to the last step, saving now and then. Returns the last state."""
    parameters = list(run.parameters.values())
    restore(run.parameters, state)
    optimizer = torch.optim.AdamW(parameters, lr=run.learning_rate, betas=run.kind.betas, weight_decay=0.0)
    trainee, optimizer = run.accelerator.prepare(run.trainee, optimizer)
    if state.optimizer:
        optimizer.load_state_dict(state.optimizer)
    losses: list[float] = []
    for number in range(state.step, len(run.steps)):
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * rate_at(number, len(run.steps))
        losses.append(backward(run, trainee, number))
        run.accelerator.clip_grad_norm_(parameters, run.kind.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.stepped(number + 1, losses[-1])
        if (number + 1) % run.save_every == 0 or number + 1 == len(run.steps):
            state = saved(run, state, number + 1, sum(losses) / len(losses), optimizer)
            watch.evaluated(state.history[-1])
            losses = []
    return state


def backward(run: Run, trainee: nn.Module, number: int) -> float:
    """Compute the gradients of a step, averaged over all rows that its parts learn from. Returns the mean loss."""
    step, accelerator = run.steps[number], run.accelerator
    lessons = sum(run.loader.lessons(part) for part in step)
    own = list(enumerate(step))[accelerator.process_index :: accelerator.num_processes]
    total = torch.zeros((), device=accelerator.device)
    for i, part in own:
        batch = run.loader.batch(part)
        with accelerator.no_sync(trainee) if i != own[-1][0] else contextlib.nullcontext():
            with autocast(run):
                loss = trainee(batch, seed_of(run.seed, number, i))
            # Data parallelism averages over processes, and these are shares of one sum: hence the factor.
            accelerator.backward(loss * (accelerator.num_processes / lessons))
        total += loss.detach()
    return float(accelerator.reduce(total, reduction="sum")) / lessons


def autocast(run: Run) -> torch.autocast:
    """A context in which the trainee computes in bfloat16, if it is to."""
    return torch.autocast(run.accelerator.device.type, torch.bfloat16, enabled=run.half)


def seed_of(seed: int, step: int, part: int) -> int:
    """A seed for each part of each step."""
    return int(np.random.SeedSequence([seed, step, part]).generate_state(1)[0])


def rate_at(step: int, steps: int) -> float:
    """Share of the highest learning rate, 0 to 1: a linear rise, then a linear fall to zero."""
    warm_up = max(1, min(WARM_UP, steps // 10))
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up), 1.0)


def restore(parameters: Mapping[str, nn.Parameter], state: State) -> None:
    """Put the state's weights into the parameters, which stay the same objects."""
    with torch.no_grad():
        for name, weight in state.weights.items():
            parameters[name].copy_(weight)


def saved(run: Run, state: State, step: int, loss: float, optimizer: Any) -> State:
    """The state after ``step``, with figures on held-out data; the main process writes it."""
    entry = Entry(step, loss, ())
    weights: dict[str, Tensor] = {name: one.detach().cpu().clone() for name, one in run.parameters.items()}
    if run.accelerator.is_main_process:
        with autocast(run):
            acceptance, speedup = run.judge()
        entry = Entry(step, loss, acceptance.by_step, speedup)
    state = State(state.settings, step, weights, optimizer.state_dict(), [*state.history, entry])
    if run.accelerator.is_main_process:
        save_state(state, run.state_file)
    run.accelerator.wait_for_everyone()
    return state
