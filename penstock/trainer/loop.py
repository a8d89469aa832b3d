"""The training loop: gradients of a step's parts, a step of the optimiser, and now and then figures and state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.trainer.data.batches import Loader
from penstock.trainer.evaluate import Acceptance
from penstock.trainer.kinds.base import Kind
from penstock.trainer.state import Entry, State, save_state

WARM_UP: Final = 100
"""Steps over which the learning rate rises, but at most a tenth of the run."""

Step = Sequence[Sequence[int]]
"""The samples of each part of an optimiser step."""


class Watch(Protocol):
    """Is notified of every step and every evaluation."""

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
    """Whether bfloat16 autocast is on. Accelerate's own switch is not used, since it is one for the whole process."""
    seed: int
    save_every: int
    state_file: Path
    judge: Callable[[], tuple[Acceptance, float | None]]


def train(run: Run, state: State, watch: Watch) -> State:
    """Train from ``state`` to the last step, saving on the way. Returns the final state."""
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
    """Compute the gradients of a step, averaged over the rows learned from in all its parts. Returns the mean loss."""
    step, accelerator = run.steps[number], run.accelerator
    lessons = sum(run.loader.lessons(part) for part in step)
    own = list(enumerate(step))[accelerator.process_index :: accelerator.num_processes]
    total = torch.zeros((), device=accelerator.device)
    for i, part in own:
        batch = run.loader.batch(part)
        with accelerator.no_sync(trainee) if i != own[-1][0] else contextlib.nullcontext():
            with autocast(run):
                loss = trainee(batch, seed_of(run.seed, number, i))
            # Data parallelism averages gradients over processes; here they are shares of one sum.
            accelerator.backward(loss * (accelerator.num_processes / lessons))
        total += loss.detach()
    return float(accelerator.reduce(total, reduction="sum")) / lessons


def autocast(run: Run) -> torch.autocast:
    return torch.autocast(run.accelerator.device.type, torch.bfloat16, enabled=run.half)


def seed_of(seed: int, step: int, part: int) -> int:
    """A seed of its own for each part of each step."""
    return int(np.random.SeedSequence([seed, step, part]).generate_state(1)[0])


def rate_at(step: int, steps: int) -> float:
    """Fraction of the highest learning rate: a linear rise, then a linear fall to zero."""
    warm_up = max(1, min(WARM_UP, steps // 10))
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up), 1.0)


def restore(parameters: Mapping[str, nn.Parameter], state: State) -> None:
    with torch.no_grad():
        for name, weight in state.weights.items():
            parameters[name].copy_(weight)


def saved(run: Run, state: State, step: int, loss: float, optimizer: Any) -> State:
    """The state after ``step`` with figures on held-out data, written by the main process."""
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
