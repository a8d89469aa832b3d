"""Records that compiled functions receive by address: numbers and further addresses.

Shapes as in ``compiled.kernels``. An address of 0 means that something does not exist. Code that fills in an address
keeps the memory there alive for as long as it may be read.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

ADDRESS: Final = np.int64
NUMBER: Final = np.int64


def record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    return np.dtype(list(fields), align=True)


INT4, INT8, BFLOAT16, FLOAT16, FLOAT32 = 4, 8, 16, 17, 32
"""Forms of weights, of the rows that they are multiplied with, and of keys and values."""

NORM: Final = record(("weight", ADDRESS), ("width", NUMBER), ("least", np.float32))
"""An ``RMSNorm``."""
WEIGHTS: Final = record(
    ("values", ADDRESS), ("scales", ADDRESS), ("form", NUMBER), ("shift", NUMBER), ("inputs", NUMBER),
    ("outputs", NUMBER),
)  # fmt: skip
"""A linear layer, as in ``products.Weights``; inputs and outputs are padded to whole groups and blocks."""
ROWS: Final = record(("numbers", ADDRESS), ("scales", ADDRESS), ("sums", ADDRESS), ("count", NUMBER))
"""Rows in the form that products take. Whole numbers have scales and sums, see ``compiled.blocks``."""
PRODUCT: Final = record(
    ("weights", WEIGHTS), ("rows", ROWS), ("out", ADDRESS), ("counters", ADDRESS), ("threads", NUMBER)
)
ATTENTION: Final = record(
    ("query", ADDRESS), ("query_head", NUMBER), ("query_row", NUMBER), ("keys", ADDRESS), ("key_group", NUMBER),
    ("key_slot", NUMBER), ("values", ADDRESS), ("value_group", NUMBER), ("value_slot", NUMBER), ("rows", ADDRESS),
    ("starts", ADDRESS), ("slots", ADDRESS), ("units", NUMBER), ("groups", NUMBER), ("out", ADDRESS),
    ("out_row", NUMBER), ("out_head", NUMBER), ("scaling", np.float32), ("softcap", np.float32), ("sinks", ADDRESS),
    ("counters", ADDRESS), ("threads", NUMBER), ("attend", ADDRESS),
)  # fmt: skip
"""``query_head``, ``key_slot`` and the like are strides in bytes. A unit is a row's query heads of one group."""
LAYER: Final = record(
    ("input_norm", NORM), ("qkv", WEIGHTS), ("bias", ADDRESS), ("query_norm", NORM), ("key_norm", NORM),
    ("o_proj", WEIGHTS), ("mlp_norm", NORM), ("gate_up", WEIGHTS), ("down_proj", WEIGHTS),
)  # fmt: skip
STACK: Final = record(
    ("layers", ADDRESS), ("attentions", ADDRESS), ("count", NUMBER), ("queries", NUMBER), ("groups", NUMBER),
    ("width", NUMBER), ("inner", NUMBER), ("own_change", NUMBER), ("own_opened", NUMBER),
    ("hidden", ADDRESS), ("normed", ADDRESS), ("qkv", ADDRESS),
    ("query", ADDRESS), ("cos", ADDRESS), ("sin", ADDRESS), ("slots", ADDRESS), ("attended", ADDRESS),
    ("change", ADDRESS), ("gates", ADDRESS), ("opened", ADDRESS), ("rows", ROWS), ("form", NUMBER),
    ("counters", ADDRESS), ("threads", NUMBER), ("first", NUMBER), ("last", NUMBER),
)  # fmt: skip
"""Layers and the buffers that they share; ``inner`` is F, ``count`` the number of layers.

A run goes through the phases [first, last), counted over all layers. Of a tensor parallel rank ``queries``, ``groups``
and ``inner`` are its own, and ``own_change`` and ``own_opened`` say how many bytes of a row stand before its own.

``form`` is that of hidden states between layers, and of keys and values; the states lie in float32.
"""


def pointer_to(kind: Any) -> Any:
    """A function for compiled code that turns an address into a pointer for ``carray``."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            return build.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


floats, numbers = pointer_to(types.float32), pointer_to(types.int64)
words, shorts = pointer_to(types.uint32), pointer_to(types.uint16)
PRODUCT_TYPE, ATTENTION_TYPE = from_dtype(PRODUCT), from_dtype(ATTENTION)
LAYER_TYPE, STACK_TYPE = from_dtype(LAYER), from_dtype(STACK)
layers_at, attentions_at, norms_at = map(pointer_to, (LAYER_TYPE, ATTENTION_TYPE, from_dtype(NORM)))


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)
