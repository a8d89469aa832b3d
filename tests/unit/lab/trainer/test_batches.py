"""Every sample is trained on once an epoch, in an order that seed and epoch alone decide."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.lab.trainer.states import Loader, StateCache, epoch_steps
from tests.training import corpus_of

CORPUS = corpus_of(*range(3, 40), 5)


def steps(seed: int = 0, epoch: int = 0, parts: int = 1) -> list[list[list[int]]]:
    return list(epoch_steps(CORPUS, seed, epoch, 80, parts))


def test_every_training_sample_once_and_no_step_too_long() -> None:
    assert sorted(i for step in steps() for part in step for i in part) == list(CORPUS.training)
    assert all(sum(len(CORPUS.samples[i]) for part in step for i in part) <= 80 for step in steps())
    assert steps() == steps()
    assert len({str(found) for found in (steps(), steps(seed=1), steps(epoch=1))}) == 3


def test_no_part_is_empty() -> None:
    in_parts = steps(parts=2)
    assert all(len(step) == 2 and all(step) for step in in_parts)
    whole = [sorted(i for part in step for i in part) for step in steps()]
    assert [sorted(i for part in step for i in part) for step in in_parts] == [one for one in whole if len(one) > 1]


def test_a_batch_has_the_states_before_its_tokens(tmp_path: Path) -> None:
    corpus = corpus_of(5, 4)
    states = {i: torch.arange(len(sample) * 4.0).view(-1, 4) + 100 * i for i, sample in enumerate(corpus.samples)}
    save_file({str(i): one for i, one in states.items()}, tmp_path / "00000.safetensors")
    batch = Loader(corpus, StateCache(tmp_path, corpus.samples, (1, 3)), (1,), 3, "cpu").batch([0, 1])
    tokens = torch.from_numpy(corpus.samples[0].tokens_L)
    assert batch.tokens_Bn[0].tolist() == tokens[1:4].tolist()
    assert batch.states_BnF[0].tolist() == states[0][:3, :2].tolist()
    assert batch.final_BnD[0].tolist() == states[0][1:4, 2:].tolist()
    assert batch.final_BnD[1, :2].tolist() == states[1][1:3, 2:].tolist()
    assert batch.learned_Bn.tolist() == [[True] * 3, [True, True, False]]
