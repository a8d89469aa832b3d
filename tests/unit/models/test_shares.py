"""The ranks of a tensor parallel stage compute the very bits of one rank, in every format of weights.

Each rank loads a checkpoint that has only those numbers right that a host is sent for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import key_groups
from penstock.core import ConfigError
from penstock.hosts.weights import Held, ranges_of
from penstock.models.linear import works
from penstock.models.loader import check_loads
from penstock.models.shares import Ranks
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.linked import HALF, StageRankLost, exchanges
from penstock.stage.visibility import BatchView, view_of
from tests.checkpoints import LAYERS, make_checkpoint
from tests.gguf_files import make_gguf
from tests.packed_checkpoints import COMPRESSED, by_awq, by_bitsandbytes, by_gptq, compressed
from tests.unit.models.compiled.formats import FORMATS

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")

TOKENS = [17, 3, 99, 42, 8, 64, 110, 11, 12, 13, 14]
BATCHES = [range(9), range(9, 10), range(10, 11)]
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
"""Three groups of two heads, three blocks of inner rows: for two ranks, and for three."""


def own_files(path: Path, rank: int, size: int) -> Path:
    """A copy of the checkpoint with zeros, as a host has holes, where the rank needs no numbers."""
    checkpoint = open_checkpoint(str(path))
    held = Held(0, checkpoint.num_layers, rank, size, key_groups(checkpoint.config))
    copies = path.parent / f"{path.stem}-{rank}-of-{size}"
    copies.mkdir()
    for name, ranges in ranges_of(path, [held], checkpoint.num_layers).items():
        whole = ((path / name) if path.is_dir() else path.with_name(name)).read_bytes()
        copy = bytearray(len(whole))
        for start, end in ranges:
            copy[start:end] = whole[start:end]
        (copies / name).write_bytes(copy)
    return copies if path.is_dir() else copies / path.name


def of_ranks(path: Path, size: int, **options: Any) -> list[StageModel]:
    count = open_checkpoint(str(path)).num_layers
    folders = [own_files(path, rank, size) if size > 1 else path for rank in range(size)]
    stages = [
        load_stage(str(folder), 0, count, capacity=32, ranks=Ranks(rank, size), **options)
        for rank, folder in enumerate(folders)
    ]
    if size > 1:
        for stage, exchange in zip(stages, exchanges(size), strict=True):
            stage.ranks.exchange = exchange
    return stages


def computed(stages: Sequence[StageModel], view: BatchView) -> tuple[Tensor, Tensor]:
    """The states and logits of all rows, which the first rank computes while the others follow it."""
    followers = [threading.Thread(target=stage.follow, args=(view, len(view))) for stage in stages[1:]]
    for follower in followers:
        follower.start()
    hidden = stages[0].forward(view, None)
    logits = stages[0].logits(hidden, range(len(view)))
    for follower in followers:
        follower.join()
    return hidden, logits


def compared(path: Path, sizes: Sequence[int], **options: Any) -> None:
    whole, *shared = [of_ranks(path, size, **options) for size in (1, *sizes)]
    for rows in BATCHES:
        view = view_of(TOKENS, rows)
        states, logits = computed(whole, view)
        for stages in shared:
            found = computed(stages, view)
            assert torch.equal(found[0], states), (len(stages), rows)
            assert torch.equal(found[1], logits), (len(stages), rows)
    for stages in shared:
        held = [stage.kv_bytes for stage in stages]
        assert sum(held) == whole[0].kv_bytes
        assert max(stage.weight_bytes for stage in stages) < whole[0].weight_bytes


def formats_and_sizes() -> Iterator[Any]:
    """Every format over two ranks or over three, in turn; and, as ``whole``, over the other number."""
    for number, (name, options) in enumerate(FORMATS.items()):
        for size in (2, 3):
            sampled = size == 2 + number % 2
            yield pytest.param(options, size, id=f"{name}-{size}", marks=[] if sampled else [pytest.mark.whole])


@pytest.mark.parametrize(("options", "size"), [*formats_and_sizes()])
def test_every_format(tmp_path: Path, options: dict[str, Any], size: int) -> None:
    compared(make_checkpoint(tmp_path, "llama", **UNEVEN), [size], **options)


@pytest.mark.parametrize(
    ("name", "options", "changes"),
    [
        ("qwen2", {"quantization": "int4"}, {}),
        ("qwen3", {"dtype": "bfloat16"}, {}),
        ("mistral", {"quantization": "int8"}, {}),
        ("llama", {"quantization": "int8", "dtype": "bfloat16"}, {"tie_word_embeddings": True}),
        ("llama", {}, {"tie_word_embeddings": True}),
    ],
)
def test_families(tmp_path: Path, name: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    compared(make_checkpoint(tmp_path, name, **changes), [2], **options)


GGUF: Final = {
    Kind.F32: "none",
    Kind.F16: "none",
    Kind.BF16: "int8",
    Kind.Q4_0: "int4",
    Kind.Q8_0: "int8",
    Kind.Q4_K: "int4",
    Kind.Q6_K: "int8",
}


@pytest.mark.parametrize(("kind", "quantization"), GGUF.items(), ids=lambda value: str(getattr(value, "name", value)))
def test_gguf_files(tmp_path: Path, kind: Kind, quantization: str) -> None:
    width = {"hidden_size": 256, "intermediate_size": 512} if kind.name.endswith("_K") else {}
    compared(make_gguf(tmp_path, kind=kind, **width), [2], quantization=quantization)


PACKED: Final[dict[str, Callable[[Path], Path]]] = {
    **{name: partial(compressed, layout=layout, **options) for name, (layout, options, _) in COMPRESSED.items()},
    "gptq": by_gptq,
    "awq": by_awq,
    "bitsandbytes of four bits": partial(by_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes of eight bits": partial(by_bitsandbytes, load_in_8bit=True),
}


@pytest.mark.parametrize("write", PACKED.values(), ids=PACKED)
def test_packed_checkpoints(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    compared(write(tmp_path), [2], quantization="int8")


def test_what_ranks_cannot_share_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size cannot be more than 1 for this model: ranks share"):
        of_ranks(make_checkpoint(tmp_path / "gemma2", "gemma2"), 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 5, .* its layers have 2 groups"):
        of_ranks(make_checkpoint(tmp_path / "llama", "llama"), LAYERS)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_that_ranks_cannot_share_are_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    checkpoint = open_checkpoint(str(make_checkpoint(tmp_path, "llama", **changes)))
    check_loads(checkpoint)
    with pytest.raises(ConfigError, match="tensor_parallel_size cannot be more than 1 for this model: ranks share"):
        check_loads(checkpoint, ranks=2)


def test_rows_larger_than_the_memory_are_gathered_in_pieces() -> None:
    width = HALF // 4 // 2 - 3
    ends, bounds = exchanges(3), (0, 5, 5, width)
    whole = np.arange(5 * width, dtype=np.float32).reshape(5, -1)
    rows = [np.zeros_like(whole) for _ in ends]
    for rank, own in enumerate(rows):
        own[:, bounds[rank] : bounds[rank + 1]] = whole[:, bounds[rank] : bounds[rank + 1]]
    threads = [threading.Thread(target=end.gather, args=(own, bounds)) for end, own in zip(ends, rows, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(own, whole) for own in rows)


def test_a_rank_that_has_ended_is_named() -> None:
    one, other = exchanges(2)
    one.check()
    other.close()
    with pytest.raises(StageRankLost, match="rank 1 of the stage has ended"):
        one.check()
    with pytest.raises(StageRankLost, match="rank 1 of the stage has ended"):
        one.gather(np.zeros((1, 4), np.float32), (0, 2, 4))
