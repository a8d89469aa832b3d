"""Which of torch's devices there are on this machine, and who gets which, before any stage is started on one."""

from __future__ import annotations

import torch

from penstock.config import FieldError


def check_device(device: str) -> None:
    """Raise FieldError where there is no ``device`` ("cpu", "cuda" or "cuda:N") here.

    The driver is only asked to count: a CUDA context would take memory that the stages need.
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


def drafting_device(device: str) -> str:
    """The device of a drafter whose stages are on other hosts, where ``device`` may be what this one lacks."""
    return "cuda:0" if device.startswith("cuda") and torch.cuda.device_count() else "cpu"


def placed(device: str, stages: int) -> tuple[str, ...]:
    """The device of each stage and, behind them, the drafter's. ``device`` has been checked.

    "cuda" spreads them over all GPUs: each stage gets one of its own while they last, and so does the drafter, else it
    shares the last stage's; more stages than GPUs share them with their neighbours, as evenly as it goes.
    """
    if device != "cuda":
        return (device,) * (stages + 1)
    found = torch.cuda.device_count()
    used = min(stages, found)
    return *(f"cuda:{stage * used // stages}" for stage in range(stages)), f"cuda:{min(stages, found - 1)}"
