"""Files of llama.cpp's own quantiser compared with llama.cpp: mean difference of log-probabilities, and perplexities.

python -m benchmarks.costs.gguf_formats [MODEL.gguf ...]

A llama of width 512 is made here and quantised from float32 into every format that llama-cpp-python writes without an
importance matrix. A file that is named is quantised anew into the formats that its widths allow. The type of each
tensor in a file is checked first. Weights are dequantised to float32 here, while llama.cpp rounds the inputs of each
product to eight bits. Needs llama-cpp-python (source only on PyPI: pip compiles it) and xllamacpp, whose llama.cpp is
the reference.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import LlamaFileType

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf_blocks import READABLE
from penstock.checkpoint.gguf_header import Header, read_header
from penstock.models.loader import load_whole
from penstock.text.tokenizer import load_tokenizer
from tests.gguf_files import make_gguf
from tests.llama_cpp import logits

MOST: Final = {
    **{name: name for name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "Q1_0")},
    **{name: name for name in ("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0")},
    **dict.fromkeys(("Q3_K_S", "Q3_K_M", "Q3_K_L"), "Q3_K"),
    **dict.fromkeys(("Q4_K_S", "Q4_K_M"), "Q4_K"),
    **dict.fromkeys(("Q5_K_S", "Q5_K_M"), "Q5_K"),
    **dict.fromkeys(("IQ3_M", "IQ3_XS"), "IQ3_S"),
    "ALL_F32": "F32",
    "MXFP4_MOE": "Q8_0",
}
"""Format -> the type of most matrices: MXFP4 is for experts, and these models have none."""
FINER: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("Q2_K", "Q3_K_M", "Q3_K_L"), ("Q3_K", "Q4_K", "Q5_K")),
    **dict.fromkeys(("Q4_K_S", "Q4_K_M", "Q5_K_M"), ("Q5_K", "Q6_K")),
    **dict.fromkeys(("IQ3_M", "IQ3_XS", "IQ3_XXS"), ("Q3_K", "Q4_K")),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), ("Q5_K",)),
}
"""Format -> finer types that ``IMPORTANT`` matrices may have."""
IMPORTANT: Final = ("attn_v", "attn_output", "ffn_down")
ENDS: Final = ("Q8_0", "Q6_K", "Q4_K")
"""Types that head and embedding may have instead: they decide most."""
NARROW: Final = {
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    **dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ4_XS"), "IQ4_NL"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Type of blocks of 256 numbers -> the type that a row gets of which 256 is no divisor."""
WIDTHS: Final[Mapping[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "initializer_range": 0.05,
}
TEXT: Final = (
    "A water wheel turns because the stream that falls on its paddles weighs more than the air on the other side.\n\n"
    "1. The mill race leads water to the wheel.\n2. The sluice decides how much of it.\n\nIn 1839 there were some "
    "60,000 of them in France alone, and most ground grain for 10 to 15 hours a day."
)


def main(files: Sequence[Path]) -> None:
    print("| model | format | tensors | log-probabilities | same best token | perplexity | llama.cpp's |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        made = make_gguf(Path(folder) / "made", **WIDTHS)
        ids = torch.randint(3, 259, (64,), generator=torch.Generator().manual_seed(0)).tolist()
        for source, asked in ((made, ids), *((file, []) for file in files)):
            for kind, quantised in written(source, Path(folder)):
                print(row(source, kind, quantised, asked or tokens_of(source)), flush=True)


def tokens_of(file: Path) -> list[int]:
    return load_tokenizer(open_checkpoint(str(file)).path).encode(TEXT)


def written(source: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file that llama.cpp's quantiser makes of ``source``, after the format's name."""
    import llama_cpp

    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    for kind in LlamaFileType:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = int(kind), True, 2
        path = folder / "quantised.gguf"
        path.unlink(missing_ok=True)
        if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0:
            yield kind.name.removeprefix("MOSTLY_"), path


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def silent(level: int, text: bytes, data: Any) -> None:
    """A log callback that drops llama.cpp's messages, since it logs every tensor."""


def check_types(kind: str, header: Header) -> None:
    """Raise AssertionError, with the tensor, if one is of a type that llama.cpp does not give it in this format."""
    for name, info in header.tensors.items():
        part = name.split(".")[-2]
        allowed = {"F32"} if len(info.shape) == 1 else {MOST[kind]}
        if len(info.shape) > 1 and part in IMPORTANT:
            allowed |= {*FINER.get(kind, ())}
        if info.shape[-1] % 256:
            allowed = {NARROW.get(one, one) for one in allowed}
        if part in ("output", "token_embd") and MOST[kind] not in ("F32", "F16", "BF16"):
            allowed |= {*ENDS}
        assert info.kind.name in allowed, f"{kind}: {name} is {info.kind.name}, not one of {sorted(allowed)}"


def row(source: Path, kind: str, file: Path, ids: list[int]) -> str:
    header = read_header(file)
    check_types(kind, header)
    stored = Counter(one.kind.name for one in header.tensors.values() if len(one.shape) > 1)
    if refused := [one for one in stored if one not in {kind.name for kind in READABLE}]:
        return f"| {source.stem} | {kind} | {', '.join(refused)} | refused | | | |"
    types = ", ".join(f"{count} {name}" for name, count in stored.most_common())
    with torch.inference_mode():
        found = load_whole(open_checkpoint(str(file)), "float32")(torch.tensor([ids])).logits[0].numpy()
    own, theirs = (log_probabilities(one) for one in (found, logits(file, ids)))
    same = (own.argmax(-1) == theirs.argmax(-1)).mean()
    apart = f"{np.abs(own - theirs).mean():.4f}"
    figures = (apart, f"{same:.0%}", f"{perplexity(own, ids):.3f}", f"{perplexity(theirs, ids):.3f}")
    return f"| {source.stem} | {kind} | {types} | {' | '.join(figures)} |"


def log_probabilities(found: np.ndarray) -> np.ndarray:
    shifted = found.astype(np.float64) - found.max(-1, keepdims=True)
    lowered: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return lowered


def perplexity(found: np.ndarray, ids: list[int]) -> float:
    following = np.arange(len(ids) - 1), np.array(ids[1:])
    return float(np.exp(-found[:-1][following].mean()))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
