"""A learned drafter's checkpoint is told by its files, and refused by name where it does not fit its target."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config import FieldError
from penstock.models.speculators.open import open_speculator
from tests import speculators
from tests.checkpoints import make_checkpoint
from tests.speculators import Draft

FIELD = r"^speculative_config\.model is "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=8)))


def refused(folder: Path, target: Checkpoint, message: str) -> None:
    with pytest.raises(FieldError, match=FIELD + ".*" + message):
        open_speculator(str(folder), target)


Change = Callable[[Draft], object]
WRONG: dict[str, tuple[Callable[[Checkpoint], Draft], Change, str]] = {
    "width": (
        speculators.eagle,
        lambda d: d.config.update(hidden_size=64),
        r"hidden_size is 64, the target's 32: it was trained for another model",
    ),
    "vocabulary": (speculators.eagle, lambda d: d.config.update(vocab_size=170), "vocab_size is 170, the target's 160"),
    "layers": (
        speculators.eagle,
        lambda d: d.config.update(num_hidden_layers=2),
        "num_hidden_layers is 2, EAGLE's is 1",
    ),
    "another layer": (
        speculators.eagle,
        lambda d: d.tensors.update({"layers.1.input_layernorm.weight": torch.ones(32)}),
        r"holds the tensor layers\.1\.input_layernorm\.weight, which no layout",
    ),
    "missing tensor": (
        speculators.eagle,
        lambda d: d.tensors.pop("layers.0.mlp.up_proj.weight"),
        r"lacks the tensor layers\.0\.mlp\.up_proj\.weight \[40, 32\]",
    ),
    "shape": (
        speculators.eagle,
        lambda d: d.config.update(intermediate_size=44),
        r"gate_proj\.weight is \[40, 32\]; its configuration and the target ask for \[44, 32\]",
    ),
    "embedding": (
        speculators.eagle,
        lambda d: d.tensors.update({"embed_tokens.weight": torch.ones(150, 32)}),
        r"embed_tokens\.weight is \[150, 32\].* ask for \[160, 32\]",
    ),
    "field missing": (speculators.eagle, lambda d: d.config.pop("num_attention_heads"), "num_attention_heads is None"),
    "heads": (speculators.eagle, lambda d: d.config.update(num_attention_heads=5), "config.json cannot be used"),
    "activation": (
        speculators.eagle,
        lambda d: d.config.update(hidden_act="sharp"),
        'hidden_act is "sharp"; it has to be one of',
    ),
    "rope": (
        speculators.eagle,
        lambda d: d.config.update(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "dynamic rope depends on the longest request",
    ),
    "bias stated": (
        speculators.eagle,
        lambda d: d.config.update(bias=False),
        r"bias is False, but the file holds fc\.bias",
    ),
    "bias absent": (
        speculators.eagle,
        lambda d: (d.config.update(bias=True), d.tensors.pop("fc.bias")),
        r"bias is True, but the file lacks fc\.bias",
    ),
    "target's width": (
        speculators.eagle3,
        lambda d: d.config.update(target_hidden_size=64),
        "target_hidden_size is 64, the target's width 32",
    ),
    "fused width": (
        speculators.eagle3,
        lambda d: d.tensors.update({"fc.weight": torch.ones(32, 64)}),
        r"fc\.weight is \[32, 64\].* ask for \[32, 96\]",
    ),
    "draft vocabulary": (
        speculators.eagle3,
        lambda d: d.config.update(draft_vocab_size=50),
        r"lm_head\.weight is \[60, 32\].* ask for \[50, 32\]",
    ),
    "larger draft vocabulary": (
        speculators.eagle3,
        lambda d: d.config.update(draft_vocab_size=161),
        "drafts 161 tokens, the target knows 160",
    ),
    "map": (speculators.eagle3, lambda d: d.tensors.pop("d2t"), r"lacks the tensor d2t \[60\]"),
    "head": (speculators.eagle3, lambda d: d.tensors.pop("lm_head.weight"), r"lacks the tensor lm_head\.weight"),
    "target's vocabulary": (
        speculators.eagle3,
        lambda d: d.tensors.update(t2d=torch.ones(170, dtype=torch.bool)),
        r"t2d is \[170\].* ask for \[160\]",
    ),
    "norm of its own heads": (
        speculators.eagle3,
        lambda d: d.tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        r"q_norm\.weight, which no layout",
    ),
    "layers that it reads": (
        lambda t: speculators.speculators_eagle3(t, reads=[2, 9]),
        lambda d: None,
        r"eagle_aux_hidden_state_layer_ids is \[2, 9\]; .* the target's hidden states, 0 to 8",
    ),
    "one layer that it reads": (
        speculators.speculators_eagle3,
        lambda d: d.config.update(eagle_aux_hidden_state_layer_ids=4),
        "eagle_aux_hidden_state_layer_ids is 4; it has to be a list",
    ),
    "draft vocabulary in words": (
        speculators.eagle3,
        lambda d: d.config.update(draft_vocab_size="60"),
        "draft_vocab_size is '60'; it has to be an integer",
    ),
    "key heads": (
        speculators.eagle,
        lambda d: d.config.update(num_key_value_heads=3),
        "num_key_value_heads is 3; it has to divide the 4",
    ),
    "norm stated": (
        speculators.speculators_eagle3,
        lambda d: d.config.update(norm_before_fc=True),
        r"norm_before_fc is True, but the file lacks input_norm\.weight",
    ),
    "norm of each state": (
        speculators.speculators_eagle3,
        lambda d: d.config.update(fc_norm=True),
        r"fc_norm is True, but the file lacks fc_norm\.0\.weight",
    ),
    "norms of each state unannounced": (
        speculators.eagle31,
        lambda d: d.config.update(fc_norm=False),
        r"fc_norm is False, but the file holds fc_norm\.0\.weight",
    ),
    "a norm of one state too few": (
        speculators.eagle31,
        lambda d: d.tensors.pop("fc_norm.2.weight"),
        r"lacks the tensor fc_norm\.2\.weight \[32\]",
    ),
    "a norm of one state too many": (
        speculators.eagle31,
        lambda d: d.tensors.update({"fc_norm.3.weight": torch.ones(32)}),
        r"holds the tensor fc_norm\.3\.weight, which no layout",
    ),
    "normed output in words": (
        speculators.eagle31,
        lambda d: d.config.update(norm_output="yes"),
        "norm_output is 'yes'; it has to be true or false",
    ),
    "type": (
        speculators.speculators_eagle3,
        lambda d: d.config.update(speculators_model_type="mlp"),
        "speculators_model_type is 'mlp'; 'eagle3', 'peagle', 'dflash', 'dflash2' and 'dspark' are supported",
    ),
    "table": (
        speculators.speculators_eagle3,
        lambda d: d.config.update(transformer_layer_config=3),
        "transformer_layer_config is 3",
    ),
    "medusa's block": (
        speculators.medusa,
        lambda d: d.tensors.pop("1.0.linear.weight"),
        r"lacks the tensor blocks\.1\.layers\.0\.weight \[32, 32\]",
    ),
    "medusa's width": (
        speculators.medusa,
        lambda d: d.tensors.update({"0.0.linear.weight": torch.ones(64, 64)}),
        r"0\.0\.linear\.weight is \[64, 64\].* ask for \[32, 32\]",
    ),
    "medusa's vocabulary": (
        speculators.medusa,
        lambda d: d.tensors.update({"0.1.weight": torch.ones(170, 32)}),
        "drafts 170 tokens, the target knows 160",
    ),
    "medusa's map": (
        speculators.vllm_medusa,
        lambda d: d.tensors.pop("token_map"),
        r"lacks the tensor token_map \[60\]",
    ),
    "medusa's truncation": (
        speculators.vllm_medusa,
        lambda d: d.config.update(truncated_vocab_size=80),
        "truncated_vocab_size is 80, its heads' 60",
    ),
    "another model": (
        speculators.eagle,
        lambda d: d.tensors.pop("fc.weight"),
        "no EAGLE, EAGLE-3, P-EAGLE, Medusa, MTP, SPD, DFlash, DSpark or Headrace checkpoint",
    ),
    "spd's width": (
        speculators.spd,
        lambda d: d.config.update(hidden_size=64),
        r"hidden_size is 64, the target's 32: it was trained for another model",
    ),
    "spd's vocabulary": (speculators.spd, lambda d: d.config.update(vocab_size=170), "vocab_size is 170, .* 160"),
    "spd's version": (speculators.spd, lambda d: d.config.update(version=9), "version is 9; 10 and 11 are supported"),
    "spd's anchors": (
        speculators.spd,
        lambda d: d.config.update(aggr_feature_bound=[0, 4, 2, 7]),
        r"aggr_feature_bound is \[0, 4, 2, 7\]; it has to be a rising list of the target's states, 0 to 8",
    ),
    "an anchor that the target lacks": (
        speculators.spd,
        lambda d: d.config.update(aggr_feature_bound=[0, 2, 4, 9]),
        "a rising list of the target's states, 0 to 8",
    ),
    "an anchor too many": (
        speculators.spd,
        lambda d: d.config.update(aggr_feature_bound=[0, 2, 4, 6, 7]),
        r"lacks the tensor projections\.4\.weight",
    ),
    "spd's layers": (
        speculators.spd,
        lambda d: d.config.update(num_spec_layers=2),
        r"lacks the tensor layers\.1\.",
    ),
    "spd's number of layers": (
        speculators.spd,
        lambda d: d.config.pop("num_spec_layers"),
        "num_spec_layers is None; it has to be a whole number",
    ),
    "spd's draft vocabulary": (
        speculators.spd,
        lambda d: d.config.update(draft_vocab_size=50),
        "draft_vocab_size is 50, the tokens that it can draft are 60",
    ),
    "spd's tokens": (
        speculators.spd,
        lambda d: d.config.update(draft_token_ids=[1, 2, 160]),
        "draft_token_ids has to be a list of the target's 160 tokens",
    ),
    "spd's tokens twice": (
        speculators.spd,
        lambda d: d.config.update(draft_token_ids=[1, 2, 2]),
        "draft_token_ids names a token twice",
    ),
    "spd's depths": (
        speculators.spd_paper,
        lambda d: d.config.update(num_stages=4),
        "shallow_hidden_layer_indices is .* for each of its 4 depths",
    ),
    "spd's memory": (
        speculators.spd_paper,
        lambda d: d.tensors.pop("fixed_stage_per_layer_projs.0.1.weight"),
        r"lacks the tensor memory\.0\.1\.weight \[32, 32\]",
    ),
    "no width": (speculators.eagle, lambda d: d.config.update(hidden_size=0), "hidden_size is 0; .* above 0"),
    "no key heads": (speculators.eagle, lambda d: d.config.update(num_key_value_heads=0), "num_key_value_heads is 0"),
    "no rope": (speculators.eagle, lambda d: d.config.update(rope_parameters=3), r"config\.json cannot be used"),
    "no kind": (speculators.early_exit, lambda d: d.config.update(speculator=[]), r"speculator is \[\]; it has to be"),
    "a million layers": (
        speculators.spd,
        lambda d: d.config.update(num_spec_layers=10**9),
        r"num_spec_layers is 1000000000, but the file holds \d+ tensors",
    ),
    "a million heads": (
        speculators.medusa,
        lambda d: d.tensors.update({"999999999.0.linear.weight": torch.ones(32, 32)}),
        "numbered as of 1000000000 heads of 1 layers; it holds 4",
    ),
    "a kind of its own": (
        speculators.early_exit,
        lambda d: d.config.update(speculator="late_exit"),
        "speculator is 'late_exit'; it has to be one of spd, early_exit",
    ),
}


@pytest.mark.parametrize(("make", "change", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_refused(tmp_path: Path, target: Checkpoint, make, change: Change, message: str) -> None:
    draft = make(target)
    change(draft)
    refused(draft.save(tmp_path), target, message)


def test_spds_last_anchor_is_the_state_before_the_norm_in_its_repository(tmp_path: Path, target: Checkpoint) -> None:
    theirs = speculators.spd(target, anchors=(0, 2, 8)).save(tmp_path / "theirs")
    ours = speculators.spd(target, anchors=(0, 2, 8))
    ours.config["speculator"] = "spd"
    assert open_speculator(str(theirs), target).reads == (2, 9)
    assert open_speculator(str(ours.save(tmp_path / "ours")), target).reads == (2, 8)


def test_one_file_of_spds_is_as_good_as_its_folder(tmp_path: Path, target: Checkpoint) -> None:
    folder = speculators.spd_paper(target).save(tmp_path)
    opened = open_speculator(str(folder / "model.safetensors"), target)
    assert (opened.kind, opened.stages, opened.levels[0]) == ("spd", 3, (0,))
    assert opened.levels == open_speculator(str(folder), target).levels


def test_a_configuration_that_is_no_table_is_refused(tmp_path: Path, target: Checkpoint) -> None:
    folder = speculators.spd(target).save(tmp_path)
    (folder / "config.json").write_text("[1]")
    refused(folder, target, r"config\.json holds no JSON object but \[1\]")


def test_eagle3_reads_layers_that_a_short_target_lacks(tmp_path: Path) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", num_hidden_layers=2)))
    draft = speculators.eagle3(target).save(tmp_path / "draft")
    refused(draft, target, r"is \[2, 1, -1\]; .* hidden states, 0 to 2")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_eagle_without_configuration_is_refused(tmp_path: Path, target: Checkpoint, kind: str) -> None:
    draft = getattr(speculators, kind)(target)
    draft.config = {}
    refused(draft.save(tmp_path), target, r"no config\.json")


def test_medusa_needs_no_configuration(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.medusa(target)
    draft.config = {}
    assert open_speculator(str(draft.save(tmp_path, "medusa_lm_head.safetensors")), target).heads == 3


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt", "speculation_head.pt"])
def test_pickles_are_never_opened(
    tmp_path: Path, target: Checkpoint, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = speculators.eagle(target).save(tmp_path)
    torch.save(load_file(draft / "model.safetensors"), draft / file)
    (draft / "model.safetensors").unlink()
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("it was opened"))
    refused(draft, target, r"holds none of model\.safetensors.* a pickle \(\.bin, \.pt\) is never opened")
    refused(draft / file, target, rf"{file} is no safetensors file; a pickle \(\.bin, \.pt\) is never opened")


@pytest.mark.parametrize("name", ["fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight"])
def test_weights_are_floats(tmp_path: Path, target: Checkpoint, name: str) -> None:
    draft = speculators.eagle(target)
    draft.tensors[name] = draft.tensors[name].to(torch.int8)
    refused(draft.save(tmp_path), target, rf"{name} is stored as I8; a weight has to be a float")


@pytest.mark.parametrize(
    ("make", "name"),
    [(speculators.eagle3, "d2t"), (speculators.speculators_dflash, "d2t"), (speculators.vllm_medusa, "token_map")],
)
def test_token_ids_are_whole_numbers(tmp_path: Path, target: Checkpoint, make, name: str) -> None:
    draft = make(target)
    draft.tensors[name] = draft.tensors[name].float()
    refused(draft.save(tmp_path), target, rf"{name} is stored as F32; token ids have to be I32 or I64")


@pytest.mark.parametrize("file", ["model.safetensors", "medusa_lm_head.safetensors"])
def test_damaged_and_absent_files_are_refused(tmp_path: Path, target: Checkpoint, file: str) -> None:
    refused(tmp_path, target, "holds none of model.safetensors")
    speculators.eagle(target).save(tmp_path, file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, target, f"{file} cannot be read")
    refused(tmp_path / "elsewhere", target, "there is no folder")


def test_medusa_may_lie_beside_its_target(tmp_path: Path, target: Checkpoint) -> None:
    folder = make_checkpoint(tmp_path, num_hidden_layers=8)
    draft = speculators.medusa(target)
    draft.config = {}
    assert open_speculator(str(draft.save(folder, "medusa_lm_head.safetensors")), target).kind == "medusa"


def test_a_file_goes_by_its_own_path(tmp_path: Path, target: Checkpoint) -> None:
    speculators.eagle(target).save(tmp_path, "epoch-3.safetensors")
    speculators.eagle(target).save(tmp_path, "epoch-4.safetensors")
    named = open_speculator(str(tmp_path / "epoch-4.safetensors"), target)
    assert named.tensors["fc.weight"].file.name == "epoch-4.safetensors"


def test_hub_ids_come_from_the_cache(tmp_path: Path, target: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "models--somebody--eagle"
    speculators.eagle(target).save(hub / "snapshots" / "abc")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert open_speculator("somebody/eagle", target).path == hub / "snapshots" / "abc"


def test_shards_are_followed(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.eagle(target)
    names = sorted(draft.tensors)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        Draft(draft.config, {name: draft.tensors[name] for name in names if files[name] == file}).save(tmp_path, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = open_speculator(str(tmp_path), target).tensors
    assert {name: stored.file.name for name, stored in found.items()} == files


def warnings_of(draft: Draft, folder: Path, target: Checkpoint, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING):
        open_speculator(str(draft.save(folder)), target)
    return caplog.text


@pytest.mark.parametrize("stated", [True, False])
def test_missing_norm_before_residual_is_warned_of(tmp_path: Path, target: Checkpoint, caplog, stated: bool) -> None:
    draft = speculators.speculators_eagle3(target, **({"norm_before_residual": True} if stated else {}))
    assert ("no norm_before_residual" in warnings_of(draft, tmp_path, target, caplog)) is not stated


def test_missing_theta_is_warned_of_where_the_target_has_another(tmp_path: Path, caplog) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", rope_parameters=rope)))
    draft = speculators.eagle(target)
    assert "no rope_theta: 10000.0 is taken" in warnings_of(draft, tmp_path / "draft", target, caplog)
    caplog.clear()
    draft.config["rope_theta"] = 10000.0
    assert warnings_of(draft, tmp_path / "draft", target, caplog) == ""


def test_missing_bias_is_warned_of_where_the_file_has_none(tmp_path: Path, target: Checkpoint, caplog) -> None:
    draft = speculators.eagle(target)
    assert warnings_of(draft, tmp_path / "usual", target, caplog) == ""
    del draft.tensors["fc.bias"]
    assert "no bias, which usually means True" in warnings_of(draft, tmp_path / "none", target, caplog)
