"""A block drafter in llama.cpp's GGUF layout is the same module as in safetensors, and is refused by its own names."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.gguf_header import read_header
from penstock.checkpoint.look import method_of
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import resolve_options
from penstock.messages import Sampling
from penstock.models.speculators.block import BlockStage
from penstock.models.speculators.block_format import BlockCheckpoint
from penstock.models.speculators.open import load_speculator_stage, open_speculator
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint
from tests.gguf_drafters import GgufDraft, of_draft
from tests.gguf_files import make_gguf
from tests.speculators import Draft
from tests.unit.models.asked_blocks import CAPACITY, NAMED_TAPS, Text, asked

LAYOUTS: dict[str, Callable[[Checkpoint], Draft]] = {
    "dflash": speculators.dflash,
    "jetspec": speculators.jetspec,
    "speculators_dflash": speculators.speculators_dflash,
    "anchored_dflash": speculators.anchored_dflash,
    "dflash2": speculators.dflash2,
    "speculators_dflash2": speculators.speculators_dflash2,
    "dspark": speculators.dspark,
    "speculators_dspark": speculators.speculators_dspark,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=8)))


def loaded(path: Path, target: Checkpoint) -> BlockStage:
    stage = load_speculator_stage(str(path), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu")
    assert isinstance(stage, BlockStage)
    return stage


def answers(path: Path, target: Checkpoint, sampling: Sampling | None = None) -> list[tuple[list[int], list[float]]]:
    return asked(loaded(path, target), Text(12), 10, VOCAB, 9, sampling=sampling)


def same(one: Path, other: Path, target: Checkpoint, sampling: Sampling | None = None) -> bool:
    """Whether two files draft the same candidates; where a tensor lies in memory, its products' last bits go by."""
    pairs = list(zip(answers(one, target, sampling), answers(other, target, sampling), strict=True))
    alike = all(np.allclose(scores, others, atol=1e-5) for (_, scores), (_, others) in pairs)
    return alike and all(tokens == others for (tokens, _), (others, _) in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_drafts_what_the_same_module_in_safetensors_does(tmp_path: Path, target: Checkpoint, layout: str) -> None:
    draft = LAYOUTS[layout](target)
    folder, file = draft.save(tmp_path / "folder"), of_draft(draft, target).save(tmp_path / "drafter.gguf")
    one, other = (open_speculator(str(place), target) for place in (folder, file))
    assert isinstance(one, BlockCheckpoint)
    assert isinstance(other, BlockCheckpoint)
    assert (other.reads, other.depth, other.shape) == (NAMED_TAPS, one.depth, one.shape)
    for sampling in (Sampling(), Sampling(seed=3, temperature=1.0)):
        assert same(file, folder, target, sampling)
    assert method_of(str(file)) in one.methods


@pytest.mark.parametrize("layout", ["sliding_dflash", "sliding_dflash2"])
def test_layers_with_windows_see_their_whole_block(tmp_path: Path, target: Checkpoint, layout: str) -> None:
    """llama.cpp's layers do; a file of safetensors has to say so."""
    draft = getattr(speculators, layout)(target)
    file = of_draft(draft, target).save(tmp_path / "drafter.gguf")
    draft.config["is_causal"] = False
    assert same(file, draft.save(tmp_path / "folder"), target)


@pytest.mark.parametrize("layout", ["dflash2", "speculators_dspark"])
def test_quantised_matrices_are_read_as_the_numbers_that_they_stand_for(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    draft = LAYOUTS[layout](target)
    made = of_draft(draft, target)
    file = made.save(tmp_path / "drafter.gguf", Kind.Q8_0)
    kinds = {info.kind for info in read_header(file).tensors.values()}
    assert {Kind.Q8_0, Kind.F32} <= kinds
    for name, tensor in draft.tensors.items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0 and tensor.is_floating_point():
            stored = gguf.quants.quantize(tensor.numpy(), Kind.Q8_0)
            draft.tensors[name] = torch.from_numpy(gguf.quants.dequantize(stored, Kind.Q8_0))
    assert same(file, draft.save(tmp_path / "folder"), target)


def test_a_confidence_head_may_have_lost_its_single_row(tmp_path: Path, target: Checkpoint) -> None:
    made = of_draft(speculators.dspark(target), target)
    made.tensors["conf_proj.weight"] = made.tensors["conf_proj.weight"][0]
    assert open_speculator(str(made.save(tmp_path / "drafter.gguf")), target).kind == "dspark"


def problem_of(made: GgufDraft, path: Path, target: Checkpoint) -> str:
    """Why a drafter is refused; empty if it opens."""
    problem = f"speculative_config.model is '{path}': "
    try:
        open_speculator(str(made.save(path)), target)
    except FieldError as error:
        problem = str(error)
    intro, _, left = problem.partition(": ")
    assert intro == f"speculative_config.model is '{path}'"
    return left


NEEDED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "target_layers")
NEEDED += ("attention.layer_norm_rms_epsilon",)
WRONG: tuple[Any, ...] = (None, 0, 1, 3, 10**9, 1.5, True, "2", ["2"], [2, 9], [0.5])


@pytest.mark.parametrize("layout", ["dflash", "dflash2", "speculators_dspark"])
def test_every_entry_with_any_value_is_followed_or_refused_by_its_name(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    """Where a value fits nothing in the file, the tensor that contradicts it is named."""
    whole = of_draft(LAYOUTS[layout](target), target)
    lacking = set()
    own = [key for key in whole.entries if key.startswith("dflash.")] + ["tokenizer.ggml.mask_token_id"]
    for key in own:
        for number, value in enumerate(WRONG):
            made = of_draft(LAYOUTS[layout](target), target)
            made.entries[key] = value
            problem = problem_of(made, tmp_path / f"{number}.gguf", target)
            if problem:
                others = r" ask for \[|(lacks|holds) the tensor blk|attention heads|the keys' \d"
                assert re.search(rf"{re.escape(key)}\b|{others}", problem), (key, value, problem)
                assert "config.json" not in problem
            if problem and value is None:
                lacking.add(key)
    needed = {*(f"dflash.{name}" for name in NEEDED), "tokenizer.ggml.mask_token_id"}
    chosen = [name for name in own if name.startswith(("dflash.conv", "dflash.selector"))]
    needed |= {*chosen, *(["dflash.block_size"] if layout == "speculators_dspark" else [])}
    assert lacking >= needed


@pytest.mark.parametrize("layout", ["dflash2", "speculators_dspark"])
def test_every_tensor_that_is_missing_misshapen_or_strange_is_refused_by_its_name(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    for name in of_draft(LAYOUTS[layout](target), target).tensors:
        made = of_draft(LAYOUTS[layout](target), target)
        whole = made.tensors.pop(name)
        problem = problem_of(made, tmp_path / "missing.gguf", target)
        optional = name == "token_embd.weight" or name.startswith("conf_proj")
        assert (problem == "") if optional else (f"lacks the tensor {name} [" in problem)
        made.tensors[name] = np.ones((3, 5), dtype=whole.dtype)
        problem = problem_of(made, tmp_path / "misshapen.gguf", target)
        # These state the head's rank and its vocabulary, which other tensors then contradict.
        states = name in ("markov_w1.weight", "d2t")
        assert (" ask for [" in problem) if states else (f"{name} is [3, 5]" in problem)
        made.tensors |= {name: whole, f"{name}s": whole.astype(np.float32)}
        assert f"holds the tensor {name}s, which no layout" in problem_of(made, tmp_path / "strange.gguf", target)
        if name != "d2t":
            del made.tensors[f"{name}s"]
            made.tensors[name] = np.ones(whole.shape, dtype=np.int32)
            assert f"{name} is stored as I32" in problem_of(made, tmp_path / "whole.gguf", target)


def test_a_tensor_under_the_modules_own_name_is_strange(tmp_path: Path, target: Checkpoint) -> None:
    made = of_draft(speculators.dflash(target), target)
    made.tensors["norm.weight"] = made.tensors["output_norm.weight"]
    assert "holds the tensor norm.weight, which no layout" in problem_of(made, tmp_path / "x.gguf", target)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "dflash-draft"}, "^it is a block drafter as forks of llama.cpp write it, .* convert its"),
    ({"general.architecture": "dspark"}, "^it is a block drafter as forks of llama.cpp write it, .* convert its"),
    ({"general.architecture": "llama"}, "^general.architecture is \"llama\"; .* method 'draft_model'"),
    (
        {"dflash.attention.sliding_window": 7, "dflash.attention.sliding_window_pattern": None},
        r"sliding_window_pattern is None; it has to say of 2 layers",
    ),
    (
        {"dflash.attention.sliding_window": 4, "dflash.attention.sliding_window_pattern": [True, False]},
        r"dflash\.attention\.sliding_window is 4 .* at least the block's 5",
    ),
    ({"dflash.logit_scale": 0.5}, r"dflash\.logit_scale is 0\.5, which is not supported"),
    ({"dflash.final_logit_softcapping": 30.0}, r"dflash\.final_logit_softcapping is 30\.0, the target's"),
    ({"dflash.rope.dimension_sections": [2, 2, 0, 0]}, r"only \[4, 0, 0, 0\] is supported"),
    ({"dflash.attention.value_length": 16}, "value_length is 16; it has to be the keys' 8"),
    ({"tokenizer.ggml.tokens": ["t"] * 161}, "has 161 tokens, the target's 160: it was trained"),
    ({"dflash.target_layers": [2, 5, 9]}, r"target_layers is \[2, 5, 9\]; .* integers, 0 to 8"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_is_not_followed_is_refused_with_the_remedy(
    tmp_path: Path, target: Checkpoint, changed: dict[str, Any], message: str
) -> None:
    made = of_draft(speculators.dflash(target), target)
    made.entries |= changed
    made.architecture = made.entries.pop("general.architecture", made.architecture)
    assert re.search(message, problem_of(made, tmp_path / "x.gguf", target))


def test_scaled_rotation_is_followed(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.dflash2(target)
    made = of_draft(draft, target)
    made.entries |= {"dflash.rope.scaling.type": "linear", "dflash.rope.scaling.factor": 4.0}
    made.entries["dflash.rope.dimension_sections"] = [4, 0, 0, 0]
    draft.config["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}
    file, folder = made.save(tmp_path / "x.gguf"), draft.save(tmp_path / "folder")
    assert same(file, folder, target)
    draft.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    assert not same(file, draft.save(folder), target)


def test_an_unknown_entry_is_warned_of(tmp_path: Path, target: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    made = of_draft(speculators.dflash(target), target)
    made.entries["dflash.hyper_connection_count"] = 4
    with caplog.at_level(logging.WARNING):
        open_speculator(str(made.save(tmp_path / "x.gguf")), target)
    assert "holds hyper_connection_count, which is not known here" in caplog.text


def test_methods_of_gguf_files(tmp_path: Path, target: Checkpoint) -> None:
    for layout, method in (("dflash", "dflash"), ("dflash2", "dflash"), ("speculators_dspark", "dspark")):
        assert method_of(str(of_draft(LAYOUTS[layout](target), target).save(tmp_path / f"{layout}.gguf"))) == method
    assert method_of(str(make_gguf(tmp_path / "model"))) == "draft_model"
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    assert method_of(str(tmp_path / "damaged.gguf")) == "draft_model"
    forked = of_draft(speculators.dflash(target), target)
    forked.architecture = "dflash-draft"
    with pytest.raises(FieldError, match=r"speculative_config\.model is .*, a block drafter as forks of llama\.cpp"):
        method_of(str(forked.save(tmp_path / "forked.gguf")))


def test_an_engine_needs_only_the_files_path(tmp_path: Path, target: Checkpoint) -> None:
    file = str(of_draft(speculators.dflash2(target), target).save(tmp_path / "drafter.gguf"))
    setup = resolve_options(EngineOptions(model=str(target.path), speculative_config={"model": file}))
    assert isinstance(setup.speculator, BlockCheckpoint)
    assert setup.speculator.kind == "dflash"
    options = EngineOptions(model=str(target.path), speculative_config={"model": file, "method": "dspark"})
    with pytest.raises(FieldError, match="method is 'dspark', the checkpoint is of kind 'dflash': name that"):
        resolve_options(options)


@pytest.mark.parametrize("architecture", ["dflash", "dflash-draft", "dspark"])
def test_a_block_drafter_is_no_model(tmp_path: Path, target: Checkpoint, architecture: str) -> None:
    made = of_draft(speculators.dflash(target), target)
    made.architecture = architecture
    with pytest.raises(ConfigError, match=r"x\.gguf is a block drafter"):
        open_checkpoint(str(made.save(tmp_path / "x.gguf")))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_byte_of_the_header_may_be_another(tmp_path: Path, target: Checkpoint, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(["dflash2", "speculators_dspark"]), "layout")
    sound = tmp_path / f"{layout}.gguf"
    if not sound.exists():
        of_draft(LAYOUTS[layout](target), target).save(sound)
    content = bytearray(sound.read_bytes())
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        content[data.draw(st.integers(0, read_header(sound).data_start - 1), "place")] = data.draw(st.integers(0, 255))
    (tmp_path / "mutated.gguf").write_bytes(bytes(content))
    with contextlib.suppress(ConfigError):
        loaded(tmp_path / "mutated.gguf", target)
