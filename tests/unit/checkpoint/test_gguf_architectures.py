"""Every architecture that is accepted gives the numbers of the checkpoint that its file was made of."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from penstock.checkpoint import gguf as weights
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf_blocks import FLOATS, READABLE, UNPACKERS, floats
from penstock.checkpoint.gguf_header import SUPPORTED, read_header
from penstock.core import ConfigError
from penstock.models.loader import load_module, load_whole
from tests import gguf_files
from tests.gguf_files import ARCHITECTURES, THETA, TOKENS, finish, make_gguf, with_entries

IDS = torch.tensor([[5, 9, 13, 9, 5, 70, 31, 100, 4, 8, 15, 16, 23, 42, 99, 3, 77, 6, 12, 90]])
SAME_TABLES = ("llama", "llama_tied", "qwen2")
"""transformers takes all that matters of these from the file, and leaves out something of each other."""


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def original(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent / "checkpoint", dtype=torch.float32)


def test_all_that_are_accepted_are_tested() -> None:
    assert {name for name, _ in ARCHITECTURES.values()} == set(SUPPORTED)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_gives_its_checkpoints_logits(tmp_path: Path, architecture: str) -> None:
    path = make_gguf(tmp_path, architecture)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.source, checkpoint.vocab_size, checkpoint.eos_token_ids) == (path, len(TOKENS), (1,))
    found, wanted = load_whole(checkpoint, "float32"), original(path)
    expected = wanted.state_dict()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=3e-7, rtol=0)  # gemma's norms are stored plus 1
    torch.testing.assert_close(logits(found), logits(wanted), atol=2e-5, rtol=2e-5)


def tables_and_kinds() -> Iterator[Any]:
    """Every kind of block in a file of one architecture, which take turns; and, as ``whole``, in the others."""
    for number, kind in enumerate([*FLOATS, *UNPACKERS]):
        for i, architecture in enumerate(SAME_TABLES):
            marks = [] if i == number % len(SAME_TABLES) else [pytest.mark.whole]
            yield pytest.param(architecture, kind, id=f"{architecture}-{kind.name}", marks=marks)


@pytest.mark.parametrize(("architecture", "kind"), [*tables_and_kinds()])
def test_it_is_what_transformers_makes_of_the_file(tmp_path: Path, architecture: str, kind: Kind) -> None:
    widths = {"hidden_size": 256, "intermediate_size": 256} if kind.name.endswith("_K") else {}
    path = make_gguf(tmp_path, architecture, kind=kind, **widths)
    found = load_whole(open_checkpoint(str(path)), "float32")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    expected = wanted.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    own, theirs = found.config.to_dict(), wanted.config.to_dict()
    assert {key: own[key] for key in own if key != "_name_or_path"} == {
        key: theirs[key] for key in own if key != "_name_or_path"
    }
    assert own["rope_parameters"]["rope_theta"] == THETA


def test_nothing_is_said_of_what_transformers_does_not_find(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_checkpoint(str(make_gguf(tmp_path, seed=3)))
    assert caplog.records == []


def test_a_stage_reads_its_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path, kind=Kind.Q8_0)
    checkpoint = open_checkpoint(str(path))
    read: list[str] = []
    monkeypatch.setattr(weights, "floats", lambda info: read.append(info.name) or floats(info))
    load_module(checkpoint, 1, 3, "float32", "cpu")
    assert {name.split(".")[1] for name in read} == {"1", "2"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_formats_are_rounded_once(tmp_path: Path, dtype: str) -> None:
    path = make_gguf(tmp_path, kind=Kind.BF16)
    found = load_whole(open_checkpoint(str(path)), dtype).state_dict()
    for name, tensor in original(path).state_dict().items():
        stored = tensor if tensor.dim() == 1 else tensor.bfloat16()
        assert torch.equal(found[name], stored.to(getattr(torch, dtype))), name


# ------------------------------------------------------------------------------------- what transformers leaves out


def test_llama_3s_frequencies_are_divided_as_the_file_says(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    plain = 1 / THETA ** (torch.arange(0, 8, 2) / 8)
    made = tmp_path / "once"
    make_gguf(made, rope_parameters=rope)
    divided = original(made / "x").model.rotary_emb.inv_freq
    factors = (plain / divided).numpy().astype(np.float32)
    assert len(set(factors.tolist())) > 1
    path = make_gguf(tmp_path / "again", rope_parameters=rope, tensors={"rope_freqs.weight": factors})
    found = load_whole(open_checkpoint(str(path)), "float32")
    torch.testing.assert_close(found.model.rotary_emb.inv_freq, divided)
    torch.testing.assert_close(logits(found), logits(original(path)), atol=2e-5, rtol=2e-5)


def test_factors_are_read_anew_where_the_file_has_others(tmp_path: Path) -> None:
    found = []
    for factor in (1.0, 2.0):
        path = make_gguf(tmp_path / str(factor), tensors={"rope_freqs.weight": np.full(4, factor, np.float32)})
        found.append(open_checkpoint(str(path)).config.rope_parameters["long_factor"])
    assert found == [[1.0] * 4, [2.0] * 4]


def test_factors_are_a_short_list(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, tensors={"rope_freqs.weight": np.ones(300_000, np.float32)})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is F32 \[300000\]; it has to be a list of floats"):
        open_checkpoint(str(path))


def test_phi3s_factors_are_those_of_short_and_of_long_texts(tmp_path: Path) -> None:
    short, long = [1.0, 1.1, 1.2, 1.3], [1.5, 2.0, 3.0, 4.0]
    rope = {"rope_type": "longrope", "rope_theta": THETA, "short_factor": short, "long_factor": long}
    rope["original_max_position_embeddings"] = 128
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    attention = math.sqrt(1 + math.log(512 / 128) / math.log(128))  # as the converter writes it
    path = make_gguf(
        tmp_path,
        "phi3",
        rope_parameters=rope,
        original_max_position_embeddings=128,
        tensors={name: np.array(values, np.float32) for name, values in factors.items()},
        entries={"phi3.rope.scaling.original_context_length": 128, "phi3.rope.scaling.attn_factor": attention},
    )
    found, wanted = load_whole(open_checkpoint(str(path)), "float32"), original(path)
    torch.testing.assert_close(logits(found), logits(wanted), atol=2e-5, rtol=2e-5)
    stated = float(np.float32(attention))  # the file holds float32
    assert found.model.rotary_emb.attention_scaling == stated
    assert stated == pytest.approx(wanted.model.rotary_emb.attention_scaling, rel=1e-7)


@pytest.mark.parametrize(
    ("architecture", "kind", "more"),
    [("llama", "linear", {}), ("gemma3", "linear", {}), ("qwen2", "yarn", {"original_max_position_embeddings": 128})],
)
def test_scaled_rotary_embeddings(tmp_path: Path, architecture: str, kind: str, more: dict[str, int]) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": THETA, "factor": 4.0, **more}
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        rope = {"full_attention": rope, "sliding_attention": local}
    entries = {f"{architecture}.rope.scaling.type": kind, f"{architecture}.rope.scaling.factor": 4.0}
    if more:
        entries[f"{architecture}.rope.scaling.original_context_length"] = 128
    path = make_gguf(tmp_path, architecture, rope_parameters=rope, entries=entries)
    found = load_whole(open_checkpoint(str(path)), "float32")
    torch.testing.assert_close(logits(found), logits(original(path)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8, which cannot be taken into account"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale is 0\.5, which cannot"),
        ({"llama.attention.sliding_window": 6}, r"attention\.sliding_window is 6; llama has none"),
        ({"llama.final_logit_softcapping": 3.0}, r"final_logit_softcapping is 3\.0; llama has none"),
        ({"llama.attention.value_length": 4}, r"value_length is 4; it has to be the keys' 8"),
        (
            {"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0},
            r'rope\.scaling\.type is "su"; none, linear, yarn',
        ),
    ],
)
def test_what_would_change_the_numbers_unnoticed_is_refused(
    tmp_path: Path, entries: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(make_gguf(tmp_path, entries=entries)))


def test_entries_that_say_nothing_do_not_matter(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, entries={"llama.expert_count": 0, "llama.tensor_data_layout": "Meta AI original pth"})
    assert open_checkpoint(str(path)).num_layers == 5


# ----------------------------------------------------------------------------------------------- what is not accepted


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"adapter.type": "lora"}, "is a LoRA adapter; merge it"),
    ],
)
def test_what_is_no_whole_model_is_refused(tmp_path: Path, entries: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(make_gguf(tmp_path, entries=entries)))


@pytest.mark.parametrize(
    ("architecture", "purpose", "problem"),
    [
        ("llama", "adapter", "is a LoRA adapter; merge it into its model first"),
        ("clip", "mmproj", "is the vision or audio part of a multimodal model"),
        ("clip", "model", "is the vision or audio part of a multimodal model"),
        ("llama", "imatrix", "is statistics for quantising"),
        ("bert", "model", "is an encoder, which writes no text"),
        ("t5", "model", "is an encoder with a decoder"),
        ("mamba", "model", r'general\.architecture is "mamba"; GGUF files of llama, qwen2, .* can be read'),
        ("llama", "\x1b[2J", r"is of type .*\\u001b\[2J.*; only models can be run"),
    ],
)
def test_other_files_are_refused_by_what_they_are(
    tmp_path: Path, architecture: str, purpose: str, problem: str
) -> None:
    path = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(purpose)
    finish(writer)
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(path))


def test_tensors_that_no_part_takes_are_refused(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, tensors={"blk.1.attn_q_norm.weight": np.zeros(8, np.float32)})
    with pytest.raises(ConfigError, match=r"attn_q_norm\.weight is no part of a llama"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in READABLE], ids=lambda kind: kind.name)
def test_formats_that_cannot_be_unpacked_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setattr(gguf_files, "stored_as", blank)
    widths = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    path = make_gguf(tmp_path, kind=kind, **widths)
    problem = rf"weight is stored as {kind.name}; F32, .* can be read: quantise the model anew"
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(path))


def blank(data: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes of zero, in any format."""
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((len(data), data.shape[-1] // per_block * size), np.uint8) if data.ndim == 2 else data


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_a_tensor_of_another_size_is_named(tmp_path: Path, architecture: str) -> None:
    """Each tensor with one number, row or column more than the entries give it, under the file's name for it."""
    source = make_gguf(tmp_path, architecture)
    tensors = read_header(source).tensors
    for name in [*(name for name in tensors if name.startswith("blk.1.")), "token_embd.weight", "output.weight"]:
        shape = tensors.get(name, tensors["token_embd.weight"]).shape
        wider = np.zeros((*shape[:-1], shape[-1] + 1), np.float32)
        path = with_entries(source, tmp_path / "changed.gguf", {}, {name: wider})
        with pytest.raises(ConfigError, match=rf"{path}: {name} is .*; by {architecture}\..* it would be"):
            open_checkpoint(str(path))
    longer = np.zeros((len(TOKENS) + 1, tensors["token_embd.weight"].shape[1]), np.float32)
    path = with_entries(source, tmp_path / "changed.gguf", {}, {"output.weight": longer})
    with pytest.raises(ConfigError, match=r"output\.weight is .*; by token_embd\.weight .* it would be"):
        open_checkpoint(str(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_dp.weight"))
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_dp\.weight is no part"):
        open_checkpoint(str(path))
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_dp.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ConfigError, match=r"llama\.block_count is 5; the file has 6 layers"):
        open_checkpoint(str(path))


# ------------------------------------------------------------------------------------------------------- packed weights


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_grouped_weights_are_arranged_as_the_floats_are(tmp_path: Path, kind: Kind) -> None:
    checkpoint = open_checkpoint(str(make_gguf(tmp_path, kind=kind)))
    names = [name for name, size in checkpoint.weights.sizes().items() if size > 100]
    assert any("q_proj" in name for name in names)
    with contextlib.ExitStack() as files:
        for name, tensor in checkpoint.weights.slices(names, files).items():
            assert tensor.is_grouped
            assert torch.equal(tensor.grouped().dequantize(), tensor[...]), name
