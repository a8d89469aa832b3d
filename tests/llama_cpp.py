"""llama.cpp of the ``peers`` extra as a judge: its own vocabulary of a GGUF file, through the C interface in xllamacpp.

The extra's module holds the whole library. Structures of parameters are taken as it fills them in, and handed back as
they are: nothing here knows their fields, which change from release to release.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest

INSTALLED: Final = find_spec("xllamacpp") is not None
needs_llama_cpp: Final = pytest.mark.skipif(
    not INSTALLED, reason="llama.cpp is not installed: pip install 'penstock[peers]'"
)
MOST_IDS: Final = 1 << 16


class Opaque(ctypes.Structure):
    """A structure that is passed by value, larger than any of llama.cpp's."""

    _fields_ = (("words", ctypes.c_uint64 * 128),)


@cache
def library() -> Any:
    import xllamacpp

    os.environ["GGML_NO_BACKTRACE"] = "1"  # a failed assertion of its own would start a debugger

    (file,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    found = ctypes.CDLL(str(file))
    found.llama_model_default_params.restype = Opaque
    found.llama_model_load_from_file.argtypes = (ctypes.c_char_p, Opaque)
    found.llama_model_load_from_file.restype = ctypes.c_void_p
    found.llama_model_free.argtypes = (ctypes.c_void_p,)
    found.llama_model_get_vocab.argtypes = (ctypes.c_void_p,)
    found.llama_model_get_vocab.restype = ctypes.c_void_p
    found.llama_tokenize.argtypes = (
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
        *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
    )
    found.llama_context_default_params.restype = Opaque
    found.llama_init_from_model.argtypes = (ctypes.c_void_p, Opaque)
    found.llama_init_from_model.restype = ctypes.c_void_p
    found.llama_set_n_threads.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    found.llama_batch_get_one.argtypes = (ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)
    found.llama_batch_get_one.restype = Opaque
    found.llama_decode.argtypes = (ctypes.c_void_p, Opaque)
    found.llama_get_logits_ith.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    found.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    found.ggml_quantize_chunk.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        ctypes.c_void_p,
    )
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    found.llama_free.argtypes = (ctypes.c_void_p,)
    for name in ("llama_vocab_is_eog", "llama_vocab_get_add_bos", "llama_vocab_get_add_eos"):
        getattr(found, name).restype = ctypes.c_bool
    for name in ("is_eog", "get_add_bos", "get_add_eos", "n_tokens", "bos", "eos"):
        getattr(found, f"llama_vocab_{name}").argtypes = (ctypes.c_void_p, *[ctypes.c_int32] * (name == "is_eog"))
    found.llama_log_set(silent, None)
    return found


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp logs hundreds of lines for a file."""


class Vocabulary:
    """The vocabulary of a file that is open."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.add_bos = bool(library().llama_vocab_get_add_bos(handle))
        self.add_eos = bool(library().llama_vocab_get_add_eos(handle))
        self.bos, self.eos = library().llama_vocab_bos(handle), library().llama_vocab_eos(handle)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        raw, ids = text.encode(), (ctypes.c_int32 * MOST_IDS)()
        found = library().llama_tokenize(self._handle, raw, len(raw), ids, MOST_IDS, add_special, parse_special)
        assert found >= 0
        return list(ids[:found])

    def ends(self) -> list[int]:
        """The ids at which llama.cpp ends a generation."""
        count = library().llama_vocab_n_tokens(self._handle)
        return [one for one in range(count) if library().llama_vocab_is_eog(self._handle, one)]


@contextmanager
def opened(file: Path) -> Iterator[int | None]:
    """llama.cpp's handle of a GGUF file; None where it refuses the file."""
    model = library().llama_model_load_from_file(str(file).encode(), library().llama_model_default_params())
    try:
        yield model
    finally:
        if model:
            library().llama_model_free(model)


@contextmanager
def vocabulary(file: Path) -> Iterator[Vocabulary | None]:
    """The vocabulary of a GGUF file; None where llama.cpp refuses the file."""
    with opened(file) as model:
        yield Vocabulary(library().llama_model_get_vocab(model)) if model else None


def logits(file: Path, ids: Sequence[int]) -> Any:
    """float32 [N, V] after each of these tokens, keys and values in float32; None where llama.cpp refuses the file."""
    with opened(file) as model:
        if not model:
            return None
        context = library().llama_init_from_model(model, exact_parameters())
        assert context
        library().llama_set_n_threads(context, 1, 1)
        rows = library().llama_vocab_n_tokens(library().llama_model_get_vocab(model))
        found = []
        for token in ids:
            batch = library().llama_batch_get_one((ctypes.c_int32 * 1)(token), 1)
            assert library().llama_decode(context, batch) == 0
            found.append(np.ctypeslib.as_array(library().llama_get_logits_ith(context, -1), (rows,)).copy())
        library().llama_free(context)
    return np.stack(found)


def logits_or_death(file: Path, ids: Sequence[int]) -> Any:
    """``logits`` in a process of its own; None also where llama.cpp dies of the file, or has no end within a minute."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)
        found = logits(file, ids)
        with open(writes, "wb") as pipe:
            pipe.write(b"" if found is None else found.astype(np.float32).tobytes())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    return np.frombuffer(content, np.float32).reshape(len(ids), -1) if content and not status else None


def quantized(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A float32 matrix [rows, n] as llama.cpp's own quantiser stores it: bytes [rows, bytes of a row]."""
    rows, width = data.shape
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    found = np.zeros((rows, width // per_block * size), np.uint8)
    source, even = np.ascontiguousarray(data, np.float32), np.ones(width, np.float32)
    arguments = (*map(pointer, (source, found)), 0, rows, width, pointer(even))
    written = library().ggml_quantize_chunk(int(kind), *arguments)
    assert written == found.nbytes
    return found


def pointer(data: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(data.ctypes.data)


def exact_parameters() -> Opaque:
    """A context's, with keys and values in float32 and attention that sums in it.

    The fields are found by what llama.cpp fills in: the types of keys and values are the two float16 (1) side by side
    behind pointers, and whether flash attention is used is the last of four that are left open (-1).
    """
    found: Opaque = library().llama_context_default_params()
    words = ctypes.cast(ctypes.pointer(found), ctypes.POINTER(ctypes.c_int32))
    places = [place for place in range(16, 64) if words[place] == words[place + 1] == 1]
    assert len(places) == 1, "llama.cpp's parameters have changed"
    words[places[0]] = words[places[0] + 1] = 0
    open_ones = [place for place in range(4, 16) if words[place] == -1]
    assert open_ones == list(range(open_ones[0], open_ones[0] + 4)), "llama.cpp's parameters have changed"
    words[open_ones[-1]] = 0
    return found
