"""Small training runs: texts, options, and the parts of a run that tests look at one by one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer.corpus import Corpus, Sample
from penstock.lab.trainer.options import TrainOptions
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
    if kind == "dspark":
        small["markov_rank"] = 16
    given = () if data is None else (data,)
    return TrainOptions(kind=kind, model=str(target), data=given, output=output, **{**small, **others})


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
