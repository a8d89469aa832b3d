"""Checkpoints as people have them: read as transformers reads them, or refused before any stage is started."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import method_of
from penstock.core import ConfigError, RequestError
from penstock.engine.completion import check_known
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import resolve_options
from penstock.models.loader import HEADS, load_whole, quiet
from penstock.models.speculators.open import open_speculator
from penstock.models.stage_model import fitted
from penstock.speculation import SpeculativeConfig
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import BYTE_VOCAB, make_checkpoint
from tests.speculators import (
    Draft,
    dflash,
    dspark,
    eagle,
    eagle3,
    early_exit,
    headrace,
    jetspec,
    medusa,
    mtp,
    peagle,
    spd,
    speculators_eagle3,
    vllm_medusa,
)
from tests.staged import Staged, chain_rows

KINDS: dict[str, Callable[..., Draft]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "speculators": speculators_eagle3,
    "medusa": medusa,
    "vllm_medusa": vllm_medusa,
    "spd": spd,
    "early_exit": early_exit,
    "mtp": mtp,
    "dflash": dflash,
    "headrace": headrace,
    "jetspec": jetspec,
    "dspark": dspark,
    "peagle": peagle,
}


def edited(folder: Path, **fields: Any) -> Path:
    """Change fields of a checkpoint's config.json; None takes one out."""
    file = folder / "config.json"
    table = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))
    return folder


def weights_changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def resolved(target: Path, **speculation: Any) -> Any:
    return resolve_options(EngineOptions(model=str(target), speculative_config=speculation or None))


# ----------------------------------------------------------------------------------------- found before a stage starts


def without_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.3.input_layernorm.weight"][5] = float("nan")


def misshapen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(3, 4)


def without_layer(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.4.self_attn.v_proj.weight"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_head, r"the checkpoint lacks lm_head\.weight: download or save it again"),
        (with_nan, r"model\.layers\.3\.input_layernorm\.weight holds NaN or infinity"),
        (misshapen, r"model\.layers\.2\.mlp\.down_proj\.weight is \(3, 4\), config\.json says"),
        (without_layer, r"the checkpoint lacks model\.layers\.4\.self_attn\.v_proj\.weight"),
    ],
)
def test_weights_that_no_stage_could_load(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], problem: str
) -> None:
    folder = weights_changed(make_checkpoint(tmp_path / "x", tie_word_embeddings=False), change)
    with pytest.raises(ConfigError, match=problem):
        resolved(folder)


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"rope_type": None, "rope_theta": 1e4}, "{}.rope_type is null"),
        ({"rope_type": "so", "rope_theta": 1e4}, '{}.rope_type is "so"'),
        ({"type": None}, "{}.type is null"),
        ({"type": "linear", "factor": -1.0}, "{}.factor is -1.0"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1}, "{}.rope_theta is 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_rope_entries_that_say_nothing_known(tmp_path: Path, field: str, rope: dict[str, Any], problem: str) -> None:
    folder = edited(make_checkpoint(tmp_path / "x"), **{"rope_parameters": None, field: rope})
    with pytest.raises(ConfigError, match=rf"config\.json: {problem.format(field)}"):
        resolved(folder)


def test_a_base_is_named_where_the_file_has_it(tmp_path: Path) -> None:
    folder = edited(make_checkpoint(tmp_path / "x"), rope_parameters=None, rope_theta=1)
    with pytest.raises(ConfigError, match=r"config\.json: rope_theta is 1"):
        resolved(folder)


@pytest.mark.parametrize("rope", [{}, {"type": "linear", "factor": 2.0}], ids=str)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_rope_entries_of_old_files_are_read(tmp_path: Path, field: str, rope: dict[str, Any]) -> None:
    folder = edited(make_checkpoint(tmp_path / "x"), **{"rope_parameters": None, field: rope})
    found = load_whole(resolved(folder).checkpoint, "float32").model.rotary_emb.inv_freq
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.rotary_emb.inv_freq
    assert torch.equal(found, wanted)


def test_a_drafters_map_leads_into_the_target(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    folder = eagle3(open_checkpoint(str(target))).save(tmp_path / "drafter")
    weights_changed(folder, lambda tensors: tensors["d2t"].add_(100_000))
    with pytest.raises(ConfigError, match=r"d2t leads to token \d+; the target has"):
        resolved(target, method="eagle3", model=str(folder))


# ---------------------------------------------------------------------------------------------- two sources of weights


def test_a_stale_index_is_passed_over_as_in_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path / "x")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        found = load_whole(open_checkpoint(str(folder)), "float32").state_dict()
    assert "holds model.safetensors, and model.safetensors.index.json names model-00001-of-00002" in caplog.text
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


EMBEDDINGS = ("model.embed_tokens.weight", "gpt_neox.embed_in.weight")


def held(tensors: dict[str, torch.Tensor], names: Sequence[str]) -> str:
    (found,) = tensors.keys() & set(names)
    return found


def another_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[held(tensors, HEADS)] = tensors[held(tensors, HEADS)].flip(0).contiguous()


def the_same_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[held(tensors, HEADS)] = tensors[held(tensors, EMBEDDINGS)].clone()


def no_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[held(tensors, HEADS)]


def no_embedding(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[held(tensors, EMBEDDINGS)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", [another_head, the_same_head, no_head, no_embedding])
def test_a_head_beside_an_embedding_is_transformers_choice(
    tmp_path: Path,
    family: str,
    tied: bool,
    change: Callable[[dict[str, torch.Tensor]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = weights_changed(make_checkpoint(tmp_path / "x", family, tie_word_embeddings=False), change)
    edited(folder, tie_word_embeddings=tied)
    with quiet():
        wanted, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:  # transformers would go on with random numbers
        (lacking,) = info["missing_keys"]
        with pytest.raises(ConfigError, match=rf"the checkpoint lacks {lacking}: .*tie_word_embeddings False"):
            resolved(folder)
        return
    resolved(folder)
    assert ("holds other numbers than" in caplog.text) is (tied and change is another_head)
    ids = torch.tensor([[5, 9, 13, 70]])
    with torch.inference_mode():
        expected = wanted(ids).logits[0]
    for stages in (1, 2):
        found = Staged(folder, stages, max_model_len=64).run(chain_rows(0, ids[0].tolist(), range(4)), range(4), [0])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_head_of_another_size_than_the_embedding_is_named(tmp_path: Path, family: str) -> None:
    def longer(tensors: dict[str, torch.Tensor]) -> None:
        name = held(tensors, HEADS)
        tensors[name] = torch.cat([tensors[name], tensors[name][:3]])

    folder = weights_changed(make_checkpoint(tmp_path / "x", family, tie_word_embeddings=False), longer)
    edited(folder, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"config\.json: tie_word_embeddings is true, and .*\.weight is \[163, 32\]"):
        resolved(folder)


# ------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("stated", "read"),
    [
        *((name, name) for name in ("float32", "float16", "bfloat16")),
        *((f"torch.{name}", name) for name in ("float32", "float16", "bfloat16")),
        *(("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("float", "float32")),
        *(("auto", "float32"), ("float64", "float32"), (None, "float32")),
    ],
)
def test_formats_in_all_their_names(tmp_path: Path, field: str, stated: str | None, read: str) -> None:
    folder = edited(make_checkpoint(tmp_path / "x"), **{"dtype": None, "torch_dtype": None, field: stated})
    assert open_checkpoint(str(folder)).dtype == read


@pytest.mark.parametrize("stated", ["int8", "torch.nn", "so"])
def test_what_is_no_format_is_named(tmp_path: Path, stated: str) -> None:
    folder = edited(make_checkpoint(tmp_path / "x"), dtype=stated)
    with pytest.raises(ConfigError, match=rf'config\.json: dtype is "{stated}"; it has to be auto or one of float32'):
        open_checkpoint(str(folder))


# -------------------------------------------------------------------------------------------------------- draft models


def test_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", tokenizer=True)
    for rows in (BYTE_VOCAB + 5, BYTE_VOCAB):
        draft = make_checkpoint(tmp_path / str(rows), tokenizer=True, vocab_size=rows)
        assert resolved(target, model=str(draft)).draft is not None
        assert resolved(draft, model=str(target)).draft is not None
    logits = torch.arange(6.0).reshape(1, 6)
    assert fitted(logits, 4).tolist() == [[0, 1, 2, 3]]
    assert fitted(logits, 8)[0, 6:].tolist() == [-torch.inf] * 2
    assert fitted(logits, 6) is logits or torch.equal(fitted(logits, 6), logits)


def test_another_tokenizer_of_the_same_size_is_named(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", tokenizer=True)
    draft = make_checkpoint(tmp_path / "draft", tokenizer=True)
    file = draft / "tokenizer.json"
    table = json.loads(file.read_text())
    vocabulary = table["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(table))
    with pytest.raises(
        ConfigError, match=r"speculative_config\.model has '.' as token \d+, the target '.': a draft model"
    ):
        resolved(target, model=str(draft))


@pytest.mark.parametrize("kind", KINDS)
def test_the_method_is_told_by_the_drafters_checkpoint(tmp_path: Path, kind: str) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target")))
    folder = KINDS[kind](target).save(tmp_path / "drafter")
    named = {"speculators": "eagle3", "vllm_medusa": "medusa"}.get(kind, kind)
    assert method_of(str(folder)) == named
    options = EngineOptions(model=str(target.path), speculative_config={"model": str(folder)})
    assert isinstance(options.speculative_config, SpeculativeConfig)
    assert options.speculative_config.method == named


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"speculators_model_type": "dflash", "projector_type": "domino"}, "Domino"),
    ],
)
def test_a_drafter_that_is_not_supported_is_refused_by_its_kind(
    tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"a drafter of kind {kind} .* which is not supported; use another one"):
        EngineOptions(model="demo", speculative_config={"model": str(tmp_path)})


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_no_drafter_is_taken_for_another_kind_by_a_tensors_name(tmp_path: Path, method: str) -> None:
    """Each of these holds fc.weight and a first layer, as EAGLE-1 does; the configuration says what it is."""
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", num_hidden_layers=8)))
    draft = dflash(target)
    draft.config["dflash_config"]["projector_type"] = "domino"
    folder = draft.save(tmp_path / "drafter")
    options = {"method": method, "model": str(folder)}
    with pytest.raises(ConfigError, match=r"it is a drafter of kind Domino, which is not supported yet"):
        resolve_options(EngineOptions(model=str(target.path), speculative_config=options))


def test_a_small_model_is_a_draft_model(tmp_path: Path) -> None:
    assert method_of(str(make_checkpoint(tmp_path / "x"))) == "draft_model"
    assert method_of("some/hub-id") == method_of("demo") == "draft_model"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mtp"])
def test_what_a_drafters_configuration_has_beside_is_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", num_hidden_layers=7)))
    folder = KINDS[kind](target).save(tmp_path / "drafter")
    open_speculator(str(folder), target)
    assert "is not known here" not in caplog.text
    edited(folder, scale_of_drafts=2.0)
    open_speculator(str(folder), target)
    assert "config.json holds scale_of_drafts, which is not known here and not followed" in caplog.text


def test_a_field_of_another_kind_of_drafter_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", num_hidden_layers=7)))
    folder = KINDS["eagle"](target).save(tmp_path / "drafter")
    edited(folder, num_spec_layers=2)
    open_speculator(str(folder), target)
    assert "config.json holds num_spec_layers, which is not known here and not followed" in caplog.text


def test_layers_of_an_eagle_config_are_read(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    folder = eagle3(open_checkpoint(str(target))).save(tmp_path / "drafter")
    edited(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True})
    assert resolved(target, model=str(folder)).speculator.reads == (1, 3, 5)
    edited(folder, eagle_config={"eagle_aux_layers": [1, 3, 5]})
    with pytest.raises(ConfigError, match=r"eagle_config\.eagle_aux_layers is .* which is not known here"):
        resolved(target, model=str(folder))


# ------------------------------------------------------------------------------------------------------------- prompts


def test_a_token_without_a_row_is_the_prompts_error(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "x", tokenizer=True)
    inner = AutoTokenizer.from_pretrained(folder)
    inner.add_tokens([AddedToken("<extra>", special=True)])
    inner.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("a<extra>")
    assert ids[-1] == BYTE_VOCAB
    with pytest.raises(
        RequestError, match=rf"'<extra>', token {BYTE_VOCAB} of the tokenizer; the model's token ids are"
    ):
        check_known(tokenizer, ids, open_checkpoint(str(folder)).vocab_size)
    check_known(tokenizer, tokenizer.encode("a"), BYTE_VOCAB)
    shutil.rmtree(folder)
