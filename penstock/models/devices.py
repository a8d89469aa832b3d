"""The torch devices of this machine, and which stage gets which, before any stage is started on one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from penstock.config import FieldError

Result = TypeVar("Result")


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module's tensors to ``device`` one by one, each leaving the place where it was before the next comes."""
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
