"""Small training runs: texts, options, and the parts of a run that tests look at one by one."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer import loop
from penstock.lab.trainer.corpus import Corpus, Sample
from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.run import run_train
from penstock.lab.trainer.states import Batch
from penstock.models.speculators.open import open_speculator
from tests.speculators import Draft

LAYERS: Final = 4
TEMPLATE: Final = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template: the speaker's name, then the message, then a line feed."""

MARKED: Final = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}\n{% endgeneration %}{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The same template with the assistant's part marked."""


def write_texts(folder: Path, count: int = 12) -> Path:
    """Files that say nearly the same: something to be learned."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(f"{i}: " + "the cat sat on the mat, and the dog ran to the cat. " * 3)
    return folder


def write_lines(file: Path, *entries: Any) -> Path:
    file.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))
    return file


def options(kind: str, target: Path, data: Path | None, output: Path, **others: Any) -> TrainOptions:
    """Options of a run that takes seconds."""
    small: dict[str, Any] = {"max_length": 64, "batch_tokens": 256, "learning_rate": 3e-3, "save_every": 4}
    if kind == "mtp":
        small |= {"ttt_steps": 3}
    if kind == "eagle3":
        small |= {"draft_vocab_size": 40, "ttt_steps": 3}
    if kind in ("spd", "early-exit"):
        small["draft_vocab_size"] = 40
    if kind in ("dspark", "headrace"):
        small["markov_rank"] = 16
    given = () if data is None else (data,)
    return TrainOptions(kind=kind, model=str(target), data=given, output=output, **{**small, **others})


OWN: Final = multiprocessing.get_context("forkserver")
OWN.set_forkserver_preload(["accelerate", "tests.training"])
"""Processes of their own for runs. Their server imports torch and the trainer once for all of them."""


def killed_run(kind: str, target: Path, data: Path, output: Path, where: str, at: int) -> None:
    """A run that kills its process before step ``at``, or while the state after it is being written."""
    rate_at, save_state = loop.rate_at, loop.save_state

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stepping(step: int, steps: int) -> float:
        if where == "step" and step == at:
            die()
        return rate_at(step, steps)

    def saving(state: Any, file: Path) -> None:
        if where == "saving" and state.step == at:
            file.with_suffix(".unfinished").write_bytes(b"half of it")
            die()
        save_state(state, file)

    loop.rate_at, loop.save_state = stepping, saving
    run_train(options(kind, target, data, output, save_every=2))


def shared_run(rank: int, processes: int, port: int, kind: str, target: Path, data: Path, output: Path) -> None:
    """One of several processes that share a run, told of each other in torchrun's words."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_train(options(kind, target, data, output, max_steps=6))


def exit_codes(work: Any, *arguments: Sequence[Any]) -> list[int | None]:
    """The exit codes of processes of their own that do the work side by side, each with its arguments."""
    processes = [OWN.Process(target=work, args=tuple(given)) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def corpus_of(*lengths: int) -> Corpus:
    """Random samples of these lengths, all to be learned; the last one is held out."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(3, 100, length) for length in lengths]
    samples = [Sample(i, tokens_L, np.ones(len(tokens_L), dtype=bool)) for i, tokens_L in enumerate(drawn)]
    return Corpus(samples, list(range(len(samples) - 1)), [len(samples) - 1])


def random_batch(target: Checkpoint, sequences: int, length: int, reads: int) -> Batch:
    """Random tokens and states, all to be learned but what comes first."""
    generator = torch.Generator().manual_seed(5)
    tokens_BL = torch.randint(target.vocab_size, (sequences, length), generator=generator)
    states_BLF, final_BLD = (
        torch.randn(sequences, length, width, generator=generator)
        for width in (reads * target.hidden_size, target.hidden_size)
    )
    return Batch(tokens_BL, torch.ones(sequences, length, dtype=torch.bool), states_BLF, final_BLD)


def loaded(draft: Draft, folder: Path, target: Checkpoint) -> Any:
    """The module of a drafter's checkpoint, whose weights take gradients."""
    module = open_speculator(str(draft.save(folder)), target).load(target, "float32", "cpu")
    return module.requires_grad_(True)


def changed(of: Any, **fields: Any) -> Any:
    return dataclasses.replace(of, **fields)


def states_like(batch: Batch, states_BLF: Tensor) -> Batch:
    return changed(batch, states_BLF=states_BLF)
