"""Packing of a stage's linear layers, embedding and head; the choice of their formats and of torch devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import EXACT, torch_dtype
from penstock.models.linear import (
    FloatHead,
    FloatLinear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    SlicedLinear,
    TiedHead,
    can_pack,
    fits_int4,
    gains,
    in_eight_bits,
    in_four_bits,
    rounded,
    works,
)

# ---------------------------------------------------------------------------------------------------------------- table
# An embedding with int8 rows, and a head that multiplies by the same rows, so that tied ones are held once.


class Lookup(Protocol):
    """A table with a row for every token."""

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these tokens, float32: [..] -> [.., D]."""


class Table(nn.Module):
    """int8 rows for every token, [V, D], with a float16 scale for each group of a row."""

    values: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        found = rounded(weight.detach())
        self._width, self._group = weight.shape[1], found.group
        self.register_buffer("values", found.values)
        self.register_buffer("scales", found.scales.half())

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these tokens, float32: [..] -> [.., D]."""
        scales = self.scales[ids].float().repeat_interleave(self._group, -1)
        return (self.values[ids] * scales)[..., : self._width]


class TableEmbedding(nn.Module):
    """Drop-in for an ``nn.Embedding`` or a derived class: gemma's scales the rows that it has looked up."""

    def __init__(self, table: Lookup, embedding: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self._dtype = embedding.weight.dtype
        self._derived = None if type(embedding) is nn.Embedding else embedding
        # The class may stay, for what it does to the rows, but its own table is freed.
        embedding.weight = nn.Parameter(embedding.weight[:0], requires_grad=False)
        # ``forward`` numbers rows anew, and torch refuses a padding index that is beyond them.
        embedding.padding_idx = None

    @property
    def is_plain(self) -> bool:
        """Whether the embedding does nothing but look rows up."""
        return self._derived is None

    def forward(self, ids: Tensor) -> Tensor:
        """[..] -> [.., D]"""
        rows = self.table.rows(ids).to(self._dtype)
        if self._derived is None:
            return rows
        # The derived class looks the rows up once more: its weight is what has been found, row by row.
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        found: Tensor = functional_call(self._derived, {"weight": rows.flatten(0, -2)}, (places,))
        return found


class TableHead(Int8Linear):
    """Drop-in for the head's ``nn.Linear``; an embedding can read the same rows, so that they are held once.

    The rows are rounded as in a ``Table``, whatever the file has, so that an embedding on another stage gives the same.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, rounded(linear.weight.detach()))

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits [.., D] -> [.., V], left in float32."""
        return self.products(hidden)


# ----------------------------------------------------------------------------------------------------------------- pack
# Replaces a stage's linear layers by packed ones in the requested format, one after another.


def pack(module: nn.Module, quantization: str, *, exact: bool = False) -> None:
    """Replace every linear layer under ``module``, in place; ``quantization`` names the format, "none" for floats.

    Whole numbers are always ``exact``: a row's result does not depend on the rows beside it.
    """
    floats: Callable[[nn.Linear], nn.Module] = FloatLinear if exact else packed_floats
    replace_linears(module, QUANTIZED.get(quantization, floats))


def pack_sliced(module: nn.Module, quantization: str) -> None:
    """``pack`` for a device other than the CPU, which computes floats: "none" changes nothing."""
    if quantization != "none":
        replace_linears(module, SLICED[quantization])


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace every linear layer under ``module``, in place; each frees its weight before the next is packed."""
    for name, child in module.named_children():
        # Subclasses of Linear may compute something else, so only the class itself is replaced.
        if type(child) is nn.Linear:
            setattr(module, name, make(child))
        else:
            replace_linears(child, make)


def usable(quantization: str) -> bool:
    """Whether this processor computes with weights of this format."""
    return quantization == "none" or works()


def int4_or_int8(linear: nn.Linear) -> nn.Module:
    """An int4 layer, or an int8 one for a shape that int4's kernel cannot compute."""
    return Int4Linear(linear) if fits_int4(linear) else Int8Linear(linear)


def packed_floats(linear: nn.Linear) -> nn.Module:
    """The layer packed if that makes it faster, else unchanged."""
    return PackedLinear(linear) if gains(linear) else linear


def sliced_int8(linear: nn.Linear) -> nn.Module:
    return SlicedLinear(linear, in_eight_bits(linear))


def sliced_int4(linear: nn.Linear) -> nn.Module:
    return SlicedLinear(linear, in_four_bits(linear)) if fits_int4(linear) else sliced_int8(linear)


QUANTIZED: Final[dict[str, Callable[[nn.Linear], nn.Module]]] = {"int8": Int8Linear, "int4": int4_or_int8}
"""Name of a format -> the layer that replaces a linear one on a CPU."""
SLICED: Final[dict[str, Callable[[nn.Linear], nn.Module]]] = {"int8": sliced_int8, "int4": sliced_int4}
"""Name of a format -> the layer that replaces a linear one on another device."""


def share_tied(causal: Any, base: Any, embed: str) -> None:
    """Let the head compute with the embedding's own weight, in place, if a stage has both and they are tied."""
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    if (
        isinstance(embedding, nn.Embedding)
        and type(head) is nn.Linear
        and embedding.weight is head.weight
        and gains(head)
    ):
        causal.set_output_embeddings(TiedHead(head))


def exact_ends(causal: Any, base: Any, embed: str) -> None:
    """Replace a stage's head, if it has one, by a ``FloatHead``, in place; a tied embedding reads its rows."""
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    if type(head) is nn.Linear:
        exact = FloatHead(head)
        causal.set_output_embeddings(exact)
        # The head's blocks hold the same numbers: the embedding reads its rows out of them.
        if isinstance(embedding, nn.Embedding) and embedding.weight is head.weight:
            setattr(base, embed, TableEmbedding(exact, embedding))


def quantize_ends(causal: Any, base: Any, embed: str, *, tied: bool, sliced: bool = False) -> None:
    """Replace a stage's embedding (``base``'s ``embed``) and head, as far as it has them, by int8 ones, in place.

    Tied ones share their rows. A tied head computes the same on every stage, with or without the embedding beside it.
    ``sliced`` ones are for a device other than the CPU.
    """
    embedding, head = getattr(base, embed), causal.get_output_embeddings()
    quantized: Any = None
    if isinstance(head, nn.Linear) and sliced:
        # Tied rows are rounded as in a ``Table``, as those of ``TableHead``.
        whole = rounded(head.weight.detach()) if tied else in_eight_bits(head)
        quantized = SlicedLinear(head, whole)
        causal.set_output_embeddings(quantized)
    elif isinstance(head, nn.Linear):
        quantized = TableHead(head) if tied else Int8Linear(head)
        causal.set_output_embeddings(quantized)
    if isinstance(embedding, nn.Embedding):
        weight = embedding.weight
        shared = tied and quantized is not None and head.weight is weight
        table = quantized if shared else Table(weight)
        setattr(base, embed, TableEmbedding(table, embedding))


def check_covered(layers: nn.Module, quantization: str) -> None:
    """Raise ConfigError if the layers have weights outside of linear layers, as experts do."""
    for name, weight in layers.named_parameters():
        if weight.dim() > 1:
            raise ConfigError(
                f"quantization: {quantization} is for linear layers, and {name} is no part of one; use none"
            )


# --------------------------------------------------------------------------------------------------------------- choice
# Chooses the formats of weights and hidden states for this processor, where the user leaves that open.

INSTRUCTIONS: Final = "instructions (AVX2, FMA and F16C, or those of 64-bit ARM)"

Capability = tuple[int, int]
"""A GPU's compute capability: major, minor."""
HAS_BFLOAT16: Final = (8, 0)
"""The least compute capability (Ampere) with instructions for bfloat16."""

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a configuration that say that a row has experts to choose from."""

log = logging.getLogger(__name__)


def usable_dtype(
    asked: str, device: str, checkpoint: Checkpoint, quantization: str, capabilities: Iterable[Capability] = ()
) -> str:
    """The dtype ``asked`` for ("auto": the checkpoint's), if the device computes well in it; else float32.

    No CPU does in float16, which is used there only if asked for by name. With quantised weights ``auto`` is float32:
    half precision would make nothing faster, and a row's bits would depend on other rows. On GPUs ``auto`` has 16 bits,
    as ``half_dtype`` says; ``capabilities`` are those of them that are known.
    """
    if device != "cpu":
        return half_dtype(asked, checkpoint, min(capabilities, default=None))
    if asked == "auto" and quantization != "none":
        return "float32"
    dtype = checkpoint.dtype if asked == "auto" else asked
    packed = dtype == "bfloat16" and can_pack(torch_dtype(dtype))
    if dtype == "float32" or packed or asked == "float16":
        return dtype
    whose = "the checkpoint's dtype" if asked == "auto" else "dtype"
    log.warning(
        f"{whose} is {dtype}, for which this processor has no instructions: float32 is used instead, because {dtype} "
        "would take several times as long here"
    )
    return "float32"


def half_dtype(asked: str, checkpoint: Checkpoint, least: Capability | None) -> str:
    """The dtype for GPUs, of which the oldest has the compute capability ``least`` (None: not known).

    "auto" is the checkpoint's own format if that has 16 bits, else bfloat16; float16 where a GPU lacks bfloat16.
    """
    dtype = asked
    if asked == "auto":
        dtype = "float16" if checkpoint.dtype == "float16" else "bfloat16"
    if dtype != "bfloat16" or least is None or least >= HAS_BFLOAT16:
        return dtype
    lacking = f"a GPU of compute capability {least[0]}.{least[1]} has no instructions for bfloat16"
    if asked == "auto":
        log.warning(f"{lacking}: float16 is used instead, in which some models' numbers grow too large")
        return "float16"
    log.warning(f"{lacking}: dtype float16 is faster there")
    return dtype


def weights_format(quantization: str, device: str, checkpoint: Checkpoint, field: str = "quantization") -> str:
    """The format of a target's or draft model's weights, "none" for floats; resolves ``quantization`` "auto".

    On GPUs whole numbers are held, too, so that weights take no more memory than in their file, and become floats at
    every step (``linear.SlicedLinear``); experts, which are no linear layers, are floats there. Raises FieldError,
    which names ``field``, for a format that this processor lacks.
    """
    if quantization == "auto":
        routes = any(getattr(checkpoint.config, name, None) for name in EXPERTS)
        return "none" if routes and device != "cpu" else stored_format(checkpoint.weights.bits, device)
    check_computed(field, quantization, device)
    return quantization


def drafter_format(quantization: str, device: str, dtype: str, *, emulated: bool) -> str:
    """The format of the weights of a learned drafter's module, which computes in ``dtype``.

    int8 costs it next to no hits and takes a quarter of the time to read. On ``emulated`` devices its time is modelled,
    so that nothing would be gained. Raises FieldError like ``weights_format``.
    """
    if quantization == "auto":
        gains = device == "cpu" and dtype == "float32" and not emulated
        return "int8" if gains and usable("int8") else "none"
    field = "speculative_config.quantization"
    if quantization != "none" and device != "cpu":
        raise FieldError(
            field, f"is {quantization!r}, which learned drafters have on cpu alone; device is {device!r}: use none"
        )
    check_computed(field, quantization, device)
    return quantization


def check_computed(field: str, quantization: str, device: str) -> None:
    """Raise FieldError for a format that this processor lacks. Other devices compute floats, which they make of any."""
    if device == "cpu" and not usable(quantization):
        raise FieldError(
            field,
            f"is {quantization!r}, for which this processor lacks {INSTRUCTIONS}; use none",
        )


def check_numerics(numerics: str, device: str) -> None:
    """Raise FieldError where nothing can be ``exact``: on another device, or a processor without the instructions."""
    if numerics == EXACT and device != "cpu":
        raise FieldError("numerics", f"is {numerics!r}, which is computed on cpu alone; device is {device!r}: use fast")
    if numerics == EXACT and not works():
        raise FieldError("numerics", f"is {numerics!r}, for which this processor lacks {INSTRUCTIONS}; use fast")


def stored_format(bits: int | None, device: str) -> str:
    """The format of a file's weights of ``bits`` bits; "none" on a processor that does not compute in it."""
    name = {None: "none", 4: "int4", 8: "int8"}[bits]
    return name if device != "cpu" or usable(name) else "none"


# -------------------------------------------------------------------------------------------------------------- devices
# The torch devices of this machine, their memory, and which stage gets which, before any stage is started on one.

Result = TypeVar("Result")


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module's tensors to ``device`` one by one: each is freed where it was before the next is copied."""
    module.to(device)


def in_halves(compute: Callable[[slice], Result], rows: slice, device: torch.device) -> list[Result]:
    """The result for these rows or, where the device's memory does not suffice for them, those of both halves in order.

    Raises ConfigError where it does not suffice for one row.
    """
    try:
        return [compute(rows)]
    except torch.OutOfMemoryError as error:
        if rows.stop - rows.start <= 1:
            raise no_memory(device, "a batch of one row") from error
    # Behind the handler, since the error's traceback holds what the attempt has made.
    release(device)
    middle = (rows.start + rows.stop) // 2
    halves = slice(rows.start, middle), slice(middle, rows.stop)
    return [found for half in halves for found in in_halves(compute, half, device)]


@contextmanager
def all_cores(device: str) -> Iterator[None]:
    """Within the block, torch computes with every core that this process may use, unless ``device`` is the CPU.

    A stage on another device has one thread, and its layers are compared and joined here before they are moved.
    """
    threads = torch.get_num_threads()
    if device != "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def room_for(what: str, device: str) -> Iterator[None]:
    """Raise ConfigError where the device's memory does not suffice for what is made within the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_memory(torch.device(device), what) from error


def no_memory(device: torch.device, what: str) -> FieldError:
    """The error that says that a device's memory does not suffice for ``what``."""
    return FieldError(
        "device",
        f"is {str(device)!r}, whose memory does not suffice for {what}: use fewer kv_slots, more stages, or weights of "
        "fewer bits",
    )


def release(device: torch.device) -> None:
    """Give back memory that torch keeps of tensors that are gone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check_device(device: str) -> None:
    """Raise FieldError if ``device`` ("cpu", "cuda" or "cuda:N") does not exist here.

    Asks the driver only for the number of GPUs: a CUDA context would take memory that the stages need.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return
    found = torch.cuda.device_count()
    if found == 0:
        why = "torch finds no CUDA device here" if torch.version.cuda else "this torch was built without CUDA"
        raise FieldError("device", f"is {device!r}, but {why}; use cpu")
    if number and int(number) >= found:
        known = "cuda:0" if found == 1 else f"cuda:0 to cuda:{found - 1}"
        raise FieldError("device", f"is {device!r}; torch finds {known} here")


def finish(device: str) -> None:
    """Wait until an accelerator has done all that is queued by now: an event behind it says when."""
    event = torch.Event(device)
    event.record()
    event.synchronize()


def drafting_device(device: str) -> str:
    """The device of a drafter whose stages are on other hosts: this host may lack the ``device`` that they use."""
    found = torch.cuda.device_count() if device.startswith("cuda") else 0
    number = int(device.partition(":")[2] or 0)
    return f"cuda:{number if number < found else 0}" if found else "cpu"


def placed(device: str, stages: int) -> tuple[str, ...]:
    """The device of each stage and, last, of the drafter. ``device`` has been checked.

    "cuda" spreads them over all GPUs. Each stage gets a GPU of its own while they last, and so does the drafter;
    otherwise the drafter shares the last stage's. More stages than GPUs share them with their neighbours, as evenly as
    possible.
    """
    if device != "cuda":
        return (device,) * (stages + 1)
    found = torch.cuda.device_count()
    used = min(stages, found)
    # 5 stages on 2 GPUs: 0 0 0 1 1, and the drafter on 1.
    return *(f"cuda:{stage * used // stages}" for stage in range(stages)), f"cuda:{min(stages, found - 1)}"
