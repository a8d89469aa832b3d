"""The trainer computes what the pipeline computes: a step over the target's features, and chains drafted from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer.eagle import unroll
from penstock.messages import Features
from penstock.models.speculators.eagle import EagleStage
from penstock.stage.visibility import BatchView, view_of
from tests import speculators
from tests.training import loaded, random_batch

LENGTH = 11
ROWS = LENGTH - 2
STEPS = 4
READS = {"eagle": (4,), "eagle3": (2, 2, 1)}
"""The layers whose features the checkpoints of ``tests/speculators.py`` read, for a target of four layers."""


def view(tokens: torch.Tensor, rows: range) -> BatchView:
    """Rows of a text; node i + 1 stands at position i, because no node is 0."""
    plain = view_of(tokens.tolist(), rows)
    return dataclasses.replace(plain, nodes=plain.nodes + 1)


def staged(kind: str, module: Any, states_LF: torch.Tensor, width: int) -> EagleStage:
    """The drafter as a stage, with the target's features of the first positions, as many as there are states."""
    stage = EagleStage(module, READS[kind], width, LENGTH, "float32", "cpu")
    layers = stage.store.layers
    states = torch.cat([states_LF.chunk(len(READS[kind]), dim=-1)[READS[kind].index(one)] for one in layers], dim=-1)
    positions = list(range(len(states_LF)))
    stage.add_features(Features(layers=layers, nodes=[i + 1 for i in positions], slots=positions), states)
    return stage


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_one_step_is_the_stages_forward(tmp_path: Path, target: Checkpoint, kind: str) -> None:
    module = loaded(getattr(speculators, kind)(target), tmp_path, target)
    batch = with_states_read_twice(random_batch(target, 3, LENGTH, len(READS[kind])), kind)
    given_BnD = next(unroll(module, batch, 1))
    for sequence in range(3):
        stage = staged(kind, module, batch.states_BLF[sequence], target.hidden_size)
        output_LD = stage.forward(view(batch.tokens_BL[sequence], range(LENGTH)), None)
        torch.testing.assert_close(given_BnD[sequence], output_LD[1:-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_chain_is_drafted_as_the_stage_drafts_it(tmp_path: Path, target: Checkpoint, kind: str) -> None:
    """Chain i: features up to position i, then rows whose features are what came out for their parents."""
    draft = getattr(speculators, kind)(target)
    draft.tensors["fc.weight"] *= 0.5  # or else EAGLE's features grow from step to step, and with them their rounding
    module = loaded(draft, tmp_path, target)
    batch = with_states_read_twice(random_batch(target, 2, LENGTH, len(READS[kind])), kind)
    steps = list(unroll(module, batch, STEPS))
    assert [step.shape[1] for step in steps] == [ROWS, ROWS - 1, ROWS - 2, ROWS - 3]
    for sequence in range(2):
        for chain in range(ROWS):
            stage = staged(kind, module, batch.states_BLF[sequence, : chain + 1], target.hidden_size)
            last = min(chain + STEPS, ROWS)
            output_LD = stage.forward(view(batch.tokens_BL[sequence], range(last + 1)), None)
            for step in range(last - chain):
                given_D, expected_D = steps[step][sequence, chain], output_LD[chain + 1 + step]
                torch.testing.assert_close(given_D, expected_D, atol=1e-5, rtol=1e-5)


def with_states_read_twice(batch: Any, kind: str) -> Any:
    """A layer that is read twice has the same states both times."""
    reads, parts = READS[kind], batch.states_BLF.chunk(len(READS[kind]), dim=-1)
    states_BLF = torch.cat([parts[reads.index(layer)] for layer in reads], dim=-1)
    return dataclasses.replace(batch, states_BLF=states_BLF)


def test_gradients_reach_every_weight_through_the_chain(tmp_path: Path, target: Checkpoint) -> None:
    module = loaded(speculators.eagle3(target), tmp_path, target)
    *_, last = unroll(module, random_batch(target, 2, LENGTH, 3), STEPS)
    module.norm(last).square().sum().backward()
    lacking = [name for name, one in module.named_parameters() if one.grad is None or not one.grad.abs().sum()]
    assert lacking == ["head.0.weight"]


def test_a_sequence_shorter_than_the_chain_has_fewer_steps(tmp_path: Path, target: Checkpoint) -> None:
    module = loaded(speculators.eagle3(target), tmp_path, target)
    assert [step.shape[1] for step in unroll(module, random_batch(target, 1, 4, 3), STEPS)] == [2, 1]
