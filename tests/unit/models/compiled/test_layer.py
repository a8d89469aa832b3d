"""Compiled layers compute what the fused ones do, and a row's bits are its own through a whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.messages import CommittedSlots, Rows
from penstock.models import stage_model
from penstock.models.compiled.layer import CompiledBase, is_silu
from penstock.models.fused.base import FusedBase
from penstock.models.quantization.pack import usable
from penstock.models.stage_model import load_stage
from penstock.stage.visibility import BatchView
from tests.checkpoints import LAYERS, make_checkpoint
from tests.staged import Staged, chain_rows

COMPILED = {"llama", "llama_tied", "llama3_rope", "mistral", "mistral_window", "qwen2", "qwen3"}
COUNT = 197
TOKENS = [17, 3, 99, 42, 8, 64, 120]
FORMATS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not usable(name), reason="this processor lacks what compiled products need")
    )
    for name in ("int8", "int4")
]


@pytest.mark.parametrize("architecture", sorted(COMPILED | {"gemma2", "olmo2", "phi3"}))
@pytest.mark.parametrize("quantization", FORMATS)
def test_which_architectures_are_compiled(tmp_path: Path, architecture: str, quantization: str) -> None:
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1)
    stage = load_stage(str(path), 0, LAYERS, capacity=8, quantization=quantization, max_model_len=64)
    assert isinstance(stage._base, CompiledBase) == (architecture in COMPILED)


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("architecture", sorted(COMPILED))
def test_a_tree_beside_the_fused_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, quantization: str
) -> None:
    """On two stages, also where rows attend to a window and to two branches."""
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1)
    found = []
    for compile_ in (stage_model.compiled, lambda base: base):
        monkeypatch.setattr(stage_model, "compiled", compile_)
        stages = Staged(path, 2, quantization=quantization)
        found.append([stages.run(chain_rows(0, TOKENS, range(7)), range(7), opened=[0]), stages.run(tree(), [0, 1])])
        assert type(stages.models[0]._base) is (FusedBase if found[1:] else CompiledBase)
    # A float's last bit may move a number to the next of bfloat16's, 2^-8 of it away, or of int8's 2^-15.
    tolerance = 2**-5 if quantization == "int4" else 2**-11
    for compiled, fused in zip(*found, strict=True):
        torch.testing.assert_close(compiled, fused, atol=tolerance * float(fused.abs().max()), rtol=0)


@pytest.mark.parametrize("quantization", FORMATS)
def test_states_that_a_drafter_reads_are_those_between_the_layers(tmp_path: Path, quantization: str) -> None:
    """Each layer's output is what stages of one layer send on, and reading it changes nothing."""
    path = make_checkpoint(tmp_path, "qwen3")
    whole, watched = (Staged(path, 1, quantization=quantization) for _ in range(2))
    stages = Staged(path, LAYERS, quantization=quantization)
    watched.models[0].tap(range(LAYERS))
    rows, sent = chain_rows(0, TOKENS, range(7)), []
    for model in stages.models:
        model.forward = passing(model.forward, sent)  # type: ignore[method-assign]
    found = [staged.run(rows, range(7), opened=[0]) for staged in (whole, watched, stages)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    states = torch.stack([watched.models[0]._tapped[index][0] for index in range(LAYERS)])
    assert torch.equal(states[1:], torch.stack(sent[:-1]))


def passing(forward: Callable[..., torch.Tensor], sent: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(view: BatchView, hidden: torch.Tensor | None) -> torch.Tensor:
        sent.append(forward(view, hidden))
        return sent[-1]

    return run


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("architecture", ["llama_tied", "mistral_window", "qwen3"])
def test_a_rows_logits_are_its_own(tmp_path: Path, architecture: str, quantization: str) -> None:
    """Token by token; all at once beside another request, in slots of no order; and as drafts that stay drafts."""
    path = make_checkpoint(tmp_path, architecture)
    alone = Staged(path, 1, quantization=quantization)
    expected = []
    for i, token in enumerate(TOKENS):
        committed = [CommittedSlots(0, [i - 1])] if i else []
        rows = chain_rows(0, [token], [i], position=i, parent=i - 1)
        expected.append(alone.run(rows, [0], opened=[] if i else [0], committed=committed)[0])

    together = Staged(path, 2, quantization=quantization)
    rows = chain_rows(1, TOKENS[::-1], range(40, 47))
    own = chain_rows(0, TOKENS, [30, 4, 17, 2, 9, 60, 3])
    for i in range(len(TOKENS)):
        rows.append(0, own.nodes[i], own.slots[i], own.parents[i], own.positions[i], own.tokens[i])
    found = together.run(rows, range(7, 14), opened=[0, 1])
    assert torch.equal(found, torch.stack(expected))


def tree() -> Rows:
    branches = Rows()
    for node, (token, slot) in enumerate([(5, 9), (9, 12)]):
        branches.append(0, 100 + node, slot, 6, 7, token)
    return branches


def test_activations() -> None:
    assert is_silu(torch.nn.SiLU())
    assert not is_silu(torch.nn.GELU())
    assert not is_silu(torch.nn.GELU(approximate="tanh"))


@pytest.mark.parametrize("quantization", FORMATS)
def test_threads_share_a_prompt(tmp_path: Path, quantization: str) -> None:
    """A prompt is long enough for its products and its attention to be divided among threads."""
    path = make_checkpoint(tmp_path, "qwen3")
    rows = chain_rows(0, [(7 * i + 3) % 150 for i in range(COUNT)], range(COUNT))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(Staged(path, 1, capacity=COUNT, quantization=quantization).run(rows, range(COUNT), opened=[0]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
