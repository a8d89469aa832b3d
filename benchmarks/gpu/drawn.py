"""Models of real shapes with drawn weights, as checkpoints in temporary folders: no network, no download."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging

from benchmarks.gpu.devices import empty, free_bytes
from benchmarks.gpu.sizes import Config, Sizes
from benchmarks.shared.timed_parts import DoesNotFit, Findings, shared_folder
from penstock.hosts.facts import memory
from penstock.hosts.placement import in_gb

WRITTEN: Final = 1e9
"""Bytes per second at which weights are at least drawn, written and read again, reckoned low."""
ROOM: Final = 1.3
"""Free bytes of a device for each byte of weights: for keys, values and what a step needs beside."""
SHARD: Final = "4GB"


def main_model(options: argparse.Namespace, sizes: Sizes) -> str:
    """The name of the best model that fits on device and host. Raises DoesNotFit where none does."""
    for name in sizes.mains[:-1]:
        if not lacking(sizes.models[name], options.device):
            return name
    return sizes.mains[-1]


def lacking(config: Config, device: str) -> str:
    """The reason for which there is no room for a model; empty where there is."""
    needed = weight_bytes(config)
    rooms = {
        device: (free_bytes(device), ROOM),
        "the host's memory": (memory()[1], ROOM),  # the stages read weights there before they move
        "the disk": (shutil.disk_usage(tempfile.gettempdir()).free, 1.0),
    }
    for place, (free, each) in rooms.items():
        if free and free < each * needed:
            return f"its weights have {in_gb(needed)}, and {place} has {in_gb(free)} free"
    return ""


def weight_bytes(config: Config) -> int:
    """Bytes of the weights in a format of 16 bits."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return 2 * sum(int(parameter.numel()) for parameter in model.parameters())


@contextmanager
def drawn_model(name: str, options: argparse.Namespace, sizes: Sizes, findings: Findings) -> Iterator[str]:
    """A folder with the model in bfloat16, which lasts for the block, or for all parts if several parts need the model.

    Raises DoesNotFit for lack of memory or time.
    """
    config, kept = sizes.models[name], shared_folder() / name.replace(" ", "-")
    if kept.exists():
        yield str(kept)
        return
    if reason := lacking(config, options.device):
        raise DoesNotFit(reason)
    findings.need(2 * weight_bytes(config) / WRITTEN)
    with tempfile.TemporaryDirectory() as folder:
        draw(config, Path(folder), options.device)
        if name in sizes.mains:
            Path(folder).rename(kept)  # whole, or not at all: a part may be killed while it draws
            Path(folder).mkdir()  # for its owner to remove
        yield str(kept if kept.exists() else folder)


def draw(config: Config, folder: Path, device: str) -> None:
    """Write the model. Weights are drawn on the device, which is much faster there, and always the same."""
    settings: Any = AutoConfig.for_model(**config, dtype="bfloat16")
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    transformers_logging.disable_progress_bar()
    try:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(settings)
        model.save_pretrained(folder, max_shard_size=SHARD)
    finally:
        torch.set_default_dtype(usual)
    del model
    empty(device)
