"""Files of llama.cpp's own quantiser compared with llama.cpp: mean difference of log-probabilities, and perplexities.

python -m benchmarks.costs.gguf_formats [MODEL.gguf ...]

A llama of width 512 is made here and quantised from float32 into every format that llama-cpp-python writes without an
importance matrix. A file that is named is quantised anew into the formats that its widths allow. Weights are
dequantised to float32 here, while llama.cpp rounds the inputs of each product to eight bits. Needs llama-cpp-python
(source only on PyPI: pip compiles it) and xllamacpp, whose llama.cpp is the reference.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import LlamaFileType

from penstock.models.checkpoint import open_checkpoint
from penstock.models.gguf.header import read_header
from penstock.models.loader import load_whole
from penstock.text.tokenizer import load_tokenizer
from tests.gguf_files import make_gguf
from tests.llama_cpp import logits

WIDTHS: Final = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "initializer_range": 0.05}
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


def row(source: Path, kind: str, file: Path, ids: list[int]) -> str:
    stored = Counter(one.kind.name for one in read_header(file).tensors.values() if len(one.shape) > 1)
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
