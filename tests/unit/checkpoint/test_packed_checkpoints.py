"""Whole checkpoints that other tools packed: the numbers, and the ids, of transformers with these tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.packed import METHODS
from penstock.checkpoint.tensors import StoredTensor
from penstock.core import ConfigError
from penstock.models.loader import load_module, load_whole
from tests.packed_checkpoints import (
    COMPRESSED,
    FOUR_BITS,
    WRITERS,
    activation_order,
    by_awq,
    by_bitsandbytes,
    by_gptq,
    compressed,
    floats,
    quiet,
    rounded,
)
from tests.staged import Staged

PROMPT, TOKENS = [5, 6, 7, 100, 20], 24


def reference(path: Path, **options: Any) -> Any:
    """transformers' model of the checkpoint in float32, dequantised by the tool's own code."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def check_numbers(path: Path, expected: Mapping[str, torch.Tensor], bits: int) -> None:
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.weights.bits == bits
    found = load_whole(checkpoint, "float32").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=3e-7, atol=0, msg=name)


def check_ids(path: Path, model: Any) -> None:
    """Check that two stages give the tokens of ``generate``."""
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    assert Staged(path, 2).greedy(PROMPT, TOKENS) == ids[0, len(PROMPT) :].tolist()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_tensors(tmp_path: Path, form: str) -> None:
    layout, arguments, bits = COMPRESSED[form]
    path = compressed(tmp_path, layout, **arguments)
    model = reference(path, quantization_config=CompressedTensorsConfig(dequantize=True))
    check_numbers(path, model.state_dict(), bits)
    check_ids(path, model)


BITSANDBYTES: Final = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4, twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "eight bits": {"load_in_8bit": True},
}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param(BITSANDBYTES[form], dtype, id=f"{form}-{dtype}", marks=[pytest.mark.whole] * (dtype != sampled))
        for form, sampled in zip(BITSANDBYTES, (torch.float32, torch.bfloat16, torch.bfloat16), strict=True)
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_bitsandbytes(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    path = by_bitsandbytes(tmp_path, dtype, **options)
    model = reference(path, device_map="cpu").dequantize().float()
    check_numbers(path, model.state_dict(), 8)
    check_ids(path, model)


def check_repacked(path: Path, before: Mapping[str, torch.Tensor], bits: int, in_order: bool = True) -> None:
    """Compare a packed checkpoint with the numbers to which the floats ``before`` were rounded."""

    def rounded_to(weight: torch.Tensor) -> torch.Tensor:
        order = torch.arange(weight.shape[1]) if in_order else activation_order(weight.shape[1])
        values, scales, zeros = rounded(weight[:, order])
        found = (values.unflatten(-1, (-1, 32)) - zeros[..., None]) * scales[..., None]
        return found.flatten(-2)[:, order.argsort()]

    check_numbers(path, {n: rounded_to(w) if n.endswith("_proj.weight") else w for n, w in before.items()}, bits)


@pytest.mark.parametrize(("layout", "in_order", "bits"), [("gptq", True, 4), ("gptq_v2", True, 4), ("gptq", False, 8)])
def test_gptq(tmp_path: Path, layout: str, in_order: bool, bits: int) -> None:
    before = load_file(floats(tmp_path) / "model.safetensors")
    check_repacked(by_gptq(tmp_path, layout, in_order=in_order), before, bits, in_order)


def test_awq(tmp_path: Path) -> None:
    before = load_file(floats(tmp_path) / "model.safetensors")
    check_repacked(by_awq(tmp_path), before, 4)


def test_a_stage_reads_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(by_gptq(tmp_path)))
    read: list[str] = []
    whole = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda part: read.append(part.name) or whole(part))
    load_module(checkpoint, 1, 3, "float32", "cpu")
    assert {name.split(".")[2] for name in read} == {"1", "2"}
    assert {name.split(".")[-1] for name in read} == {"qweight", "qzeros", "scales", "g_idx"}


def test_layers_are_split_by_what_they_hold_as_floats(tmp_path: Path) -> None:
    plain = floats(tmp_path / "plain")
    before, packed = (open_checkpoint(str(path)) for path in (plain, by_gptq(tmp_path / "packed")))
    assert packed.weights.sizes() == before.weights.sizes()
    assert packed.even_split(3) == before.even_split(3)


def test_every_method_is_written_by_a_test() -> None:
    assert WRITERS.keys() == METHODS.keys()


# ------------------------------------------------------------------------------------------------------ what is refused

GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        (
            {"quant_method": "hqq"},
            rf'is "hqq"; {", ".join(METHODS)} can be read: else',
        ),
        ({}, r"is null"),
        ({"quant_method": ["awq"]}, r"is .*can be read"),
        ({"quant_method": "gptq", "checkpoint_format": []}, r"is \[\]; gptq, gptq_v2 can be read"),
        ([4], r"is \[4\]; it has to be a table"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            r'is "marlin"; gptq, gptq_v2 can be',
        ),
        ({"quant_method": "awq", "version": "gemv"}, r'is "gemv"; gemm can be read: else use a GGUF file'),
        ({"quant_method": "awq", "version": 3}, "is 3; gemm can be read"),
        ({"quant_method": "compressed-tensors"}, "is null; it has to be a table of tables"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": GROUPS},
            r'is "nvfp4-pack-quantized"; pack-quantized, int-quantized',
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": GROUPS,
                "kv_cache_scheme": {"num_bits": 8},
            },
            r"is \{.*which nothing here does",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": GROUPS,
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "is .*dense can be read",
        ),
    ],
)
def test_others_are_refused_by_name(tmp_path: Path, stated: object, problem: str) -> None:
    folder = floats(tmp_path)
    change_config(folder, stated)
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config\S* ?{problem}"):
        open_checkpoint(str(folder))


def change_config(folder: Path, stated: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))


LAYER = "model.layers.0.mlp.up_proj"


def without(part: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(f"{LAYER}.{part}")


def having(part: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({f"{LAYER}.{part}": tensor})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("qzeros"), r"up_proj\.qzeros beside it: download or save the checkpoint again"),
        (having("scales", torch.ones(3, 128).half()), r"scales has 3 groups|qzeros has the shape"),
        (having("scales", torch.ones(2, 128, dtype=torch.int8)), r"scales is stored as I8; it has to be F16"),
        (having("qzeros", torch.ones(2, 5, dtype=torch.int32)), r"qzeros holds 1 bits for every output"),
        (having("qweight", torch.ones(8, 120, dtype=torch.int32)), r"qweight has the shape \(8, 120\); by the other"),
        (having("qweight", torch.ones(0, 128, dtype=torch.int32)), r"has the shape \(0, 128\); it has to have 2 axes"),
        (having("g_idx", torch.full((64,), 2, dtype=torch.int32)), r"names groups from 2 to 2; there are 2"),
        (having("g_idx", torch.arange(63, dtype=torch.int32)), r"g_idx has the shape \(63,\)"),
    ],
)
def test_parts_that_contradict_each_other_are_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], problem: str
) -> None:
    folder = by_gptq(tmp_path)
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(folder))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def in_bytes(state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
RIGHT = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [128, 64]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without(STATE), "has no quant_state beside it"),
        (without("weight.absmax"), "has no weight.absmax beside it"),
        (without("weight"), r"has no .*up_proj\.weight beside it"),
        (having(STATE, in_bytes([1])), "is no JSON object"),
        (having(STATE, in_bytes(RIGHT)[:-1]), "is not valid JSON"),
        (having(STATE, in_bytes({**RIGHT, "shape": [128, -64]})), "says no shape of two sizes"),
        (having(STATE, in_bytes({**RIGHT, "shape": [128, 128]})), r"weight has the shape .* has to be \(8192, 1\)"),
        (having(STATE, in_bytes({**RIGHT, "blocksize": 0})), "lacks blocksize"),
        (having(STATE, in_bytes({**RIGHT, "dtype": "int64"})), "a dtype of float32, float16, bfloat16"),
        (having("weight.quant_map", torch.ones(15)), r"quant_map has the shape \(15,\)"),
    ],
)
def test_states_of_bitsandbytes_that_are_wrong_are_named(
    four_bits: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], problem: str
) -> None:
    folder = shutil.copytree(four_bits, tmp_path / "changed")
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(folder))


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_bitsandbytes(tmp_path_factory.mktemp("four_bits"), load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(tmp_path_factory.mktemp("words"), "pack-quantized", **FOUR_BITS, symmetric=False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("weight_shape"), "has no weight_shape beside it"),
        (without("weight_packed"), "belongs to no weight"),
        (without("weight_scale"), r"has no .*up_proj\.weight_scale beside it"),
        (
            having("weight_shape", torch.tensor([128, 60])),
            r"and weight_shape says \(128, 60\): there have to be 4 or 8",
        ),
        (having("weight_scale", torch.ones(128, 5)), "has 5 groups, which do not divide 64 inputs"),
        (
            having("weight_zero_point", torch.ones(16, 3, dtype=torch.int32)),
            r"_zero_point has the shape \(16, 3\)",
        ),
        (having("weight_g_idx", torch.zeros(64, dtype=torch.int32)), "orders inputs by their activations"),
    ],
)
def test_words_of_compressed_tensors_that_are_wrong_are_named(
    words: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], problem: str
) -> None:
    folder = shutil.copytree(words, tmp_path / "changed")
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=problem):
        open_checkpoint(str(folder))
