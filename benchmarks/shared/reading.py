"""Lets a learned drafter read a text as in training: asked at every token, with the text's own tokens before it.

The drafter's knowledge depends on no clock and no strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.core import RequestOutput, SamplingParams
from penstock.engine.completion import sampling_of
from penstock.engine.options import model_folder
from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.run import KINDS
from penstock.lab.trainer.states import Batch
from penstock.messages import Sampling
from penstock.models.speculators.base import SpeculatorCheckpoint
from penstock.models.stage_model import load_stage
from penstock.stage.sampler import to_float64
from penstock.stage.visibility import view_of

STEPS = 3
"""Number of steps that are looked at: positions of a chain, levels of SPD's module."""


@dataclass(frozen=True)
class Answer:
    """A prompt followed by the target's picks, which begin at index ``first``."""

    prompt_set: str
    tokens: Sequence[int]
    first: int
    sampling: Sampling


def answer_of(prompt_set: str, output: RequestOutput, params: SamplingParams) -> Answer:
    first = len(output.prompt_token_ids)
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return Answer(prompt_set, tokens, first, sampling_of(params, params.seed or 0, 0, frozenset(), first))


class Reader:
    """A drafter of one kind beside its target, both in float32. ``stages`` is the number of stages of the pipeline that
    it reads for, ``longest`` the number of tokens of the longest answer."""

    def __init__(self, model: str, kind: str, folder: str, stages: int, longest: int) -> None:
        target = open_checkpoint(model_folder(model, "target"))
        speculator = KINDS[kind].files.open(Path(folder), target)
        module, _ = KINDS[kind].files.load(speculator, target, "cpu")
        self._trainee = trainee_of(kind, module, speculator, stages, target)
        self._stage = load_stage(
            str(target.source), 0, target.num_layers, capacity=longest, dtype="float32", device="cpu"
        )
        assert isinstance(speculator, SpeculatorCheckpoint), f"{kind} reads none of the target's states"
        self._stage.tap(speculator.reads)

    @torch.inference_mode()
    def read(self, answer: Answer) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Logits before every token of the answer: the target's [n, V], and by step the drafter's n of [V].

        Where a step lacks the first tokens, its list is shorter and begins later.
        """
        hidden_LD = self._stage.forward(view_of(answer.tokens, range(len(answer.tokens))), None)
        states_BLF = self._stage.features(hidden_LD)[None]
        learned_BL = torch.arange(len(answer.tokens))[None] >= answer.first
        batch = Batch(torch.tensor([list(answer.tokens)]), learned_BL, states_BLF, states_BLF[..., :0])
        before = range(answer.first - 1, len(answer.tokens) - 1)
        steps = [[*self._logits(batch, step, hidden)] for step, hidden in enumerate(self._trainee.unroll(batch, STEPS))]
        return to_float64(self._stage.logits(hidden_LD, before)), steps

    def _logits(self, batch: Batch, step: int, hidden_1mD: Tensor) -> Iterator[np.ndarray]:
        """The drafter's logits before each token of the answer, for the rows that are learned from."""
        learned_n = batch.learned_Bn[0]
        hidden_lD = hidden_1mD[0, learned_n[len(learned_n) - hidden_1mD.shape[1] :]]
        for hidden_D in hidden_lD:
            yield to_float64(self._trainee.logits(step, hidden_D[None]))[0]


def trainee_of(kind: str, module: Any, speculator: Any, stages: int, target: Checkpoint) -> Any:
    """The module as in training, where it is asked about a whole text at once."""
    own: dict[str, Any] = {}
    if kind == "spd" and speculator.stages is None:
        own = {"anchors": tuple(speculator.levels[-1]), "stages": (stages,)}
    elif kind == "spd":
        own = {"variant": "paper", "stages": (speculator.stages,)}
    elif kind == "early-exit":
        own = {"exit_layer": speculator.reads[-1]}
    options = TrainOptions(kind=kind, output=Path("unused"), data=(Path("unused"),), **own)
    return KINDS[kind].trainee(module, nn.Identity(), KINDS[kind].settle(options, target), target, None).eval()
