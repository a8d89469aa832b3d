"""Every entry about the model, changed: llama.cpp's numbers, or refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint import gguf as folder_module
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf_header import SUPPORTED, read_header
from penstock.core import ConfigError
from penstock.models.loader import load_whole
from tests.checkpoints import make_checkpoint
from tests.gguf_files import ARCHITECTURES, COMMON, TOKENS, Whole, make_gguf, with_entries, write
from tests.llama_cpp import logits, logits_or_death, needs_llama_cpp

IDS: Final = [5, 9, 13, 9, 5, 70, 31, 100, 4, 8, 77, 42]
CLOSE: Final = {"gemma2": 4e-3, "gemma3": 4e-3}
"""Tolerance on logits up to 1, since llama.cpp looks GELU up in float16; others: float32, logits up to 9."""
OTHERS: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("attention.causal",), (True, False)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (1.0, 0.0, 2.0)),
    **dict.fromkeys(("attention.scale", "attention.max_alibi_bias", "attention.clamp_kqv"), (0.0, 0.25, 8.0)),
    **dict.fromkeys(("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"), (4,)),
    **dict.fromkeys(("attention.sliding_window", "attention.sliding_window_pattern"), (0, 1, 3)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0, 2.0)),
    **dict.fromkeys(("expert_count", "expert_used_count", "nextn_predict_layers", "pooling_type"), (0, 1)),
    **dict.fromkeys(("rope.freq_base_swa", "rope.freq_base"), (1000.0, 5000.0)),
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), (0.0, 1.0, 4.0)),
    **dict.fromkeys(("rope.scaling.attn_factor",), (1.0, 1.4, 0.7)),
    **dict.fromkeys(("rope.scaling.type",), ("none", "linear", "yarn", "longrope", "su")),
    **dict.fromkeys(("rope.scaling.original_context_length", "rope.dimension_count_swa"), (4, 64)),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast",), (32.0, 2.0)),
    **dict.fromkeys(
        ("rope.scaling.yarn_beta_slow", "rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), (1.0, 0.0)
    ),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (-1.0, 1.0, 2.0)),
    **dict.fromkeys(("rope.scaling.finetuned", "use_parallel_residual", "swin_norm"), (True, False)),
    **dict.fromkeys(("embedding_length_out", "interleave_moe_layer_step", "full_attention_interval"), (0, 32, 2)),
    **dict.fromkeys(("tensor_data_layout", "hidden_activation"), ("Meta AI original pth", "relu")),
    "vocab_size": (7, len(TOKENS)),
}
"""Entries that a file may have beside those that the converter wrote."""
TOGETHER: Final[tuple[dict[str, Any], ...]] = (
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.7},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 2.0},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.4},
    {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.4},
    {"rope.scaling.type": "linear", "rope.scale_linear": 4.0, "rope.scaling.factor": 2.0},
    {"attention.sliding_window": 3, "attention.sliding_window_pattern": 2},
    {"attention.sliding_window": 3, "attention.sliding_window_pattern": [True, False, False, True, True, False, True]},
    {"attention.head_count_kv": [2, 2, 2, 2, 2, 2, 2]},
    {"feed_forward_length": [64, 64, 64, 64, 64, 64, 64], "attention.head_count": [4, 4, 4, 4, 4, 4, 4]},
    {"attention.head_count_kv": [2, 2, 1, 2, 2, 2, 2]},
)
EVERY: Final = 12
"""One of so many changes is tried by ``make test``; ``make test-all`` tries all."""
WINDOWED_HERE: Final = ("phi3", "attention.sliding_window")
"""llama.cpp says that it leaves phi3's window out for now; here it is as in the checkpoint, so no case has one."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound file of every architecture."""
    place = tmp_path_factory.mktemp("sources")
    more = {"phi3": {"sliding_window": None}}
    return {name: make_gguf(place / name, name, **more.get(name, {})) for name in SUPPORTED}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(folder_module, "cached_assets_path", lambda *_: tmp_path / "cache")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    yield
    torch.set_num_threads(threads)


def rewritten(source: Path, path: Path, changes: dict[str, Any]) -> Path:
    """A copy of a file with these entries about the model changed; None takes one out."""
    architecture = read_header(source).architecture
    return with_entries(source, path, {f"{architecture}.{name}": value for name, value in changes.items()})


def cases(architecture: str, source: Path) -> Iterator[dict[str, Any]]:
    """One change at a time: of every entry that the file has, and of others that llama.cpp reads for some model."""
    header = read_header(source)
    for key in header.entries:
        name = key.removeprefix(f"{architecture}.")
        if name != key:
            value = header.value(key)
            yield from ({name: other} for other in (None, value * 2, type(value)(value / 2), type(value)(0)))
    for name, values in OTHERS.items():
        yield from ({name: value} for value in values if (architecture, name) != WINDOWED_HERE or not value)
    for changes in TOGETHER:
        if architecture != WINDOWED_HERE[0] or WINDOWED_HERE[1] not in changes:
            yield {name: fitting(value, header) for name, value in changes.items()}


def fitting(value: Any, header: Any) -> Any:
    """A list with a value for each layer."""
    return value[: header.value(f"{header.architecture}.block_count")] if isinstance(value, list) else value


def own(path: Path) -> np.ndarray | None:
    """Our logits, float32 [N, V]; None where the file is refused."""
    try:
        return numbers_of(path)
    except ConfigError:
        return None


def numbers_of(path: Path) -> np.ndarray:
    """Our logits, float32 [N, V]. Raises ConfigError for a file that is refused."""
    model = load_whole(open_checkpoint(str(path)), "float32")
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([IDS])).logits[0].numpy()
    return found


@needs_llama_cpp
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_some_entries_count_as_in_llama_cpp_or_are_refused(
    tmp_path: Path, sources: dict[str, Path], architecture: str
) -> None:
    walk(tmp_path, sources[architecture], architecture, SUPPORTED.index(architecture), EVERY)


@needs_llama_cpp
@pytest.mark.whole
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_entry_counts_as_in_llama_cpp_or_is_refused(
    tmp_path: Path, sources: dict[str, Path], architecture: str
) -> None:
    walk(tmp_path, sources[architecture], architecture, 0, 1)


def walk(tmp_path: Path, source: Path, architecture: str, first: int, every: int) -> None:
    read, wrong = 0, []
    for changes in islice(cases(architecture, source), first, None, every):
        path = rewritten(source, tmp_path / "changed.gguf", changes)
        found = own(path)
        if found is None:
            continue
        wanted = logits(path, IDS)
        read += 1
        if wanted is None or np.abs(found - wanted).max() > CLOSE.get(architecture, 2e-4):
            wrong.append((changes, "refused there" if wanted is None else float(np.abs(found - wanted).max())))
    shutil.rmtree(tmp_path / "cache")
    assert wrong == []
    assert read > 15 // every


def test_every_architecture_has_files_here() -> None:
    assert {name for name, _ in ARCHITECTURES.values()} == set(SUPPORTED)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_a_token_that_the_file_does_not_name_changes_no_number(
    tmp_path: Path, sources: dict[str, Path], architecture: str
) -> None:
    """transformers' configuration of phi3, for one, has a default for padding beyond a small vocabulary."""
    source = sources[architecture]
    ids = [key for key in read_header(source).entries if key.endswith("_token_id")]
    assert len(ids) == 3
    found = numbers_of(with_entries(source, tmp_path / "changed.gguf", dict.fromkeys(ids)))
    assert np.array_equal(found, numbers_of(source))


# -------------------------------------------------------------------------------------------------------------- biases


BIASED: Final = {
    "llama": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"},
    **dict.fromkeys(("qwen2", "qwen3", "gemma2", "gemma3"), frozenset({"attn_q", "attn_k", "attn_v"})),
    "phi3": set(),
}
"""Architecture -> parts whose biases are read. llama.cpp also reads those of phi3's attn_qkv and of qwen2's output."""
ATTENTION_BIAS: Final = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")


@needs_llama_cpp
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_the_bias_of_any_part_counts_as_in_llama_cpp_or_is_refused(
    tmp_path: Path, sources: dict[str, Path], architecture: str
) -> None:
    """One layer has the bias, the others have none."""
    header, random = read_header(sources[architecture]), np.random.default_rng(0)
    read = set()
    for name, info in header.tensors.items():
        if not name.startswith(("blk.1.", "output", "token_embd")):
            continue
        bias = name.replace(".weight", ".bias")
        values = random.normal(0, 0.3, info.shape[0]).astype(np.float32)
        path = with_entries(sources[architecture], tmp_path / "changed.gguf", {}, {bias: values})
        try:
            found = numbers_of(path)
        except ConfigError as error:
            assert bias in str(error)  # noqa: PT017
            continue
        wanted = logits(path, IDS)
        assert wanted is not None, bias
        assert np.abs(found - wanted).max() < CLOSE.get(architecture, 2e-4), bias
        read.add(name.split(".")[-2])
    assert read == BIASED[architecture]


@pytest.mark.parametrize("architecture", ATTENTION_BIAS)
def test_biases_are_those_of_the_checkpoint(tmp_path: Path, architecture: str) -> None:
    """The same logits as the safetensors, whose biases are random here: transformers' own are zeros at first."""
    name, settings = ARCHITECTURES[architecture]
    asked = {"attention_bias": True} | ({"mlp_bias": True} if architecture == "llama" else {})
    source = make_checkpoint(tmp_path / "checkpoint", name, **{**COMMON, **settings, **asked})
    file = source / "model.safetensors"
    tensors, random = load_file(file), torch.Generator().manual_seed(0)
    biases = {name: 0.3 * torch.randn(one.shape, generator=random) for name, one in tensors.items() if "bias" in name}
    assert len(biases) % (7 if architecture == "llama" else 3 if architecture == "qwen2" else 4) == 0 != len(biases)
    save_file({**tensors, **biases}, file, metadata={"format": "pt"})
    write(tmp_path / "x.gguf", source, name, gguf.GGMLQuantizationType.F32, {}, {})
    wanted, found = (numbers_of(path) for path in (source, tmp_path / "x.gguf"))
    assert np.abs(found - wanted).max() < 1e-4


# ------------------------------------------------------------------------------------------------------- whole numbers


OFTEN_WHOLE: Final = 450
"""One of so many whole numbers is tried by ``make test``; ``make test-all`` tries all."""
PARTS: Final = 24
"""Tests that share an architecture's whole numbers, so that each ends within the limit of a test."""
UNSIGNED: Final = (0, 1, 3, 65537, 2**31 - 1, 2**31, 2**32 - 1)
ODD: Final = (
    *(Whole(gguf.GGUFValueType.INT32, value) for value in (-1, -(2**31))),
    *(Whole(gguf.GGUFValueType.UINT64, value) for value in (2**32, 2**63, 2**64 - 1)),
    Whole(gguf.GGUFValueType.INT64, -(2**63)),
    Whole(gguf.GGUFValueType.INT8, -1),
)
"""Values of types that no entry has in llama.cpp."""


def known_entries(architecture: str) -> list[str]:
    """Every entry that the ``gguf`` package has a name for, as it is called in a file of this architecture."""
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    named = {key for group in groups for key in vars(group).values() if isinstance(key, str) and "." in key}
    named |= {f"{{arch}}.{name}" for name in OTHERS}
    keys = (key.replace("{arch}", architecture) for key in named if re.fullmatch(r"[a-z0-9_.{}]+", key))
    return sorted(re.sub(r"\{\w+\}", "0", key) for key in keys if not OTHERWISE.match(key))


OTHERWISE: Final = re.compile(
    r"general\.architecture|general\.(?!alignment|file_type|quantization_version|sampling|type)|clip|adapter|imatrix"
    r"|(diffusion|xielu)\.|gguf\."
)
"""Entries that name and describe a file, those of other kinds of file, and the one that others depend on."""


def whole_numbers(architecture: str, source: Path) -> Iterator[tuple[str, Whole]]:
    """Every entry with odd, zero, negative and huge whole numbers."""
    header = read_header(source)
    for key in {**dict.fromkeys(header.entries), **dict.fromkeys(known_entries(architecture))}:
        value = header.value(key)
        if (key in header.entries and type(value) is not int) or key == ".".join(WINDOWED_HERE):
            continue
        near = () if value is None else (value + 1, value - 1, 2 * value)
        yield from ((key, Whole(gguf.GGUFValueType.UINT32, one)) for one in {*UNSIGNED, *near} if 0 <= one < 2**32)
        yield from ((key, one) for one in ODD)


def walk_whole_numbers(tmp_path: Path, source: Path, architecture: str, first: int, every: int) -> None:
    """Each is refused by its name and nothing is left, gives llama.cpp's numbers, or changes nothing."""
    faults, unchanged, cache = [], own(source), tmp_path / "cache"
    for key, value in islice(whole_numbers(architecture, source), first, None, every):
        shutil.rmtree(cache)
        cache.mkdir()
        path = with_entries(source, tmp_path / "changed.gguf", {key: value})
        try:
            found = numbers_of(path)
        except ConfigError as error:
            if key not in str(error) or list(cache.iterdir()):
                faults.append((key, value, str(error)))
            continue
        judged = logits_or_death(path, IDS)
        wanted = unchanged if judged is None else judged
        if np.abs(found - wanted).max() > CLOSE.get(architecture, 2e-4):
            faults.append((key, value, f"read otherwise than {'unchanged' if judged is None else 'by llama.cpp'}"))
    assert faults == []


@needs_llama_cpp
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_some_whole_numbers_are_refused_by_name_or_count_as_in_llama_cpp(
    tmp_path: Path, sources: dict[str, Path], architecture: str
) -> None:
    first = SUPPORTED.index(architecture) * OFTEN_WHOLE // len(SUPPORTED)
    walk_whole_numbers(tmp_path, sources[architecture], architecture, first, OFTEN_WHOLE)


@needs_llama_cpp
@pytest.mark.whole
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_whole_number_is_refused_by_name_or_counts_as_in_llama_cpp(
    tmp_path: Path, sources: dict[str, Path], architecture: str, part: int
) -> None:
    walk_whole_numbers(tmp_path, sources[architecture], architecture, part, PARTS)
