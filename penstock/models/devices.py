"""The torch devices of this machine, and which stage gets which, before any stage is started on one."""

from __future__ import annotations

import torch

from penstock.config import FieldError


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
