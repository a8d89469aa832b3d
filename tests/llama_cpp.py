"""llama.cpp of the ``peers`` extra as a judge: its own vocabulary of a GGUF file, through the C interface in xllamacpp.

The extra's module holds the whole library. Structures of parameters are taken as it fills them in, and handed back as
they are: nothing here knows their fields, which change from release to release.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

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
def vocabulary(file: Path) -> Iterator[Vocabulary | None]:
    """The vocabulary of a GGUF file; None where llama.cpp refuses the file."""
    model = library().llama_model_load_from_file(str(file).encode(), library().llama_model_default_params())
    try:
        yield Vocabulary(library().llama_model_get_vocab(model)) if model else None
    finally:
        if model:
            library().llama_model_free(model)
