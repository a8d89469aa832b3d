"""Stages on a device that only Python knows: tensors there have shapes and no numbers (torch's FakeTensorMode).

torch calls the device ``gpu:0``. What a GPU would wait for or refuse raises an error there: a number that is read on
the host (``.item()``, ``.tolist()``, ``if tensor:``), and an operation on tensors of two devices. Copies to the host,
for which a GPU's stream waits as well, are counted.

The device belongs to the whole process, in which ``torch.accelerator`` then finds it, so that a process of its own
computes there:

    python -m tests.fake_gpu NAME ...

prints an object of JSON a line. Names are those of ``benchmarks.strategies.families``.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import moe

from penstock.checkpoint.architectures import streams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core import ConfigError
from penstock.models import loader, stage_model
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.visibility import BatchView, RequestView
from tests.checkpoints import make_checkpoint

ROOT: Final = Path(__file__).parents[1]
DEVICE: Final = "gpu:0"
CAPACITY: Final = 128
PROMPT: Final = 70
"""Tokens of the prompt: more than one fold of a state that layers carry."""
COPIES: Final = ("to", "_to_copy", "copy_")


class Traffic(TorchDispatchMode):
    """Counts copies from the host to the device, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        devices = [leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in COPIES and isinstance(found, Tensor):
            self.up += found.device.type == "gpu" and "cpu" in devices
            self.down += found.device.type == "cpu" and "gpu" in devices
        return found


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In place of ``nn.Module._apply``, which cannot put a fake tensor into a real parameter."""
    for child in module.children():
        child._apply(fn)
    for name, one in module._parameters.items():
        module._parameters[name] = None if one is None else nn.Parameter(fn(one), requires_grad=False)
    module._buffers |= {name: None if one is None else fn(one) for name, one in module._buffers.items()}
    return module


def is_bfloat16(tensor: Tensor) -> bool:
    return bool(tensor.dtype == torch.bfloat16)


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Within the block, a stage that is loaded for ``DEVICE`` computes there.

    It is read and compared on the CPU, with numbers. Only what looks at numbers once, while a stage is loaded, is left
    out: the check of the states that enter its first layer.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def upload(tensor: Tensor) -> Tensor:
        if tensor.device.type == "gpu":
            return tensor
        if id(tensor) not in moved:
            fake = mode.from_tensor(tensor.detach())
            with mode:
                moved[id(tensor)] = tensor, fake.to(DEVICE)
        return moved[id(tensor)][1]

    def move(module: nn.Module, device: torch.device) -> None:
        assert str(device) == DEVICE
        with patch.object(nn.Module, "_apply", _apply):
            module._apply(upload)

    def probe(stage: StageModel) -> None:
        with mode:
            probed(stage)

    probed = StageModel._probe
    with ExitStack() as stack:
        # Otherwise the mode keeps the number of a tensor that has only one, and computes with it on no fake device.
        stack.enter_context(patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1))
        stack.enter_context(patch.object(loader, "_checked_device", torch.device))
        stack.enter_context(patch.object(stage_model, "move", move))
        stack.enter_context(patch.object(stage_model, "check_entry", lambda *args: None))
        stack.enter_context(patch.object(StageModel, "_probe", probe))
        # A product of experts has a fake form in bfloat16 alone.
        stack.enter_context(patch.object(moe, "_can_use_grouped_mm", lambda _, weight, __: is_bfloat16(weight)))
        yield mode


def batches() -> list[BatchView]:
    """A prompt; then a tree behind it, beside another request whose slots lie far apart."""
    order, far = np.arange(PROMPT), np.array([90, 81, 120, 83, 99])
    first = RequestView(0, order, order, order, np.tri(PROMPT, dtype=bool))
    tree, behind = np.array([PROMPT, PROMPT + 1, PROMPT + 2]), np.array([PROMPT, PROMPT + 1, PROMPT + 1])
    # The second and the third row are children of the first.
    own = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=bool)
    above, positions = np.arange(PROMPT + 3), np.concatenate([order, behind])
    seen = np.concatenate([np.ones((3, PROMPT), dtype=bool), own], axis=1)
    second = RequestView(0, np.arange(3), above, positions, seen, committed=PROMPT)
    other = RequestView(1, np.arange(3, 8), far, np.arange(5), np.tri(5, dtype=bool))
    parents = np.concatenate([[PROMPT - 1, PROMPT, PROMPT], [-1], far[:-1]])
    slots, places = np.concatenate([tree, far]), np.concatenate([behind, np.arange(5)])
    numbers = np.arange(8)
    return [
        BatchView(order * 0, order + 1, order, order, order + 3, [first], order - 1),
        BatchView(np.array([0] * 3 + [1] * 5), numbers + 100, slots, places, numbers + 3, [second, other], parents),
    ]


def compute(stage: StageModel, mode: FakeTensorMode) -> list[Traffic]:
    """Run the batches through a stage; the traffic of each. Raises where something is not on the device."""
    found = []
    for view in batches():
        traffic = Traffic()
        with mode:
            entering = None if stage.is_first else torch.zeros(len(view), stage.entering_width).to(DEVICE)
            with traffic:
                hidden = stage.forward(view, entering)
                results = [hidden, stage.features(hidden)] if stage._taps else [hidden]
                results += [stage.logits(hidden, [0, 2])] if stage.is_last else []
            assert {str(one.device) for one in results} == {DEVICE}
        assert traffic.down == 0, f"{traffic.down} copies to the host"
        found.append(traffic)
    return found


def tried(name: str) -> dict[str, Any]:
    """Run a family on the device, in parts and whole, in two formats and with weights of four bits where it has those.

    Returns how many copies to the device a tree of 8 rows takes, and whether its weights may be whole numbers.
    """
    with tempfile.TemporaryDirectory() as folder, fake_gpu() as mode:
        target = str(make_checkpoint(Path(folder), name))
        layers = open_checkpoint(target).num_layers
        for first, last in ((0, 2), (2, layers)):
            compute(stage_of(target, first, last, "float32", gives_back=True), mode)
        tree = compute(stage_of(target, 0, layers, "bfloat16"), mode)[1]
        whole = True
        try:
            compute(stage_of(target, 0, layers, "bfloat16", quantization="int4"), mode)
        except ConfigError as error:
            whole = "is for linear layers" not in str(error)
            if whole:
                raise
    return {"copies": tree.up, "whole_numbers": whole}


def stage_of(target: str, first: int, last: int, dtype: str, **options: Any) -> StageModel:
    stage = load_stage(
        target, first, last, capacity=CAPACITY, dtype=dtype, device=DEVICE, max_model_len=CAPACITY, **options
    )
    if streams(stage.checkpoint.config) == 1:
        stage.tap([index for index in (1, last) if first < index <= last])
    return stage


def outcome(name: str) -> dict[str, Any]:
    """Return what ``tried`` finds, or the error that it raises, as an object of JSON."""
    try:
        return {"name": name, **tried(name)}
    except Exception as raised:
        error = raised.__cause__ or raised  # a stage calls whatever its layers raise a fault of the configuration
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{Path(one.filename).name}:{one.lineno}" for one in frames if "/torch/" not in one.filename]
        first = str(error).splitlines()[0] if str(error) else ""
        return {"name": name, "error": f"{type(error).__name__}: {first[:300]}", "at": " > ".join(places[-6:])}


def begin() -> None:
    """Make the device known to torch, in this process and for its lifetime."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # from torch 2.13 on

    _setup_privateuseone_for_python_backend("gpu")
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # torch logs what an operation on fake tensors raises


def main() -> None:
    parser = argparse.ArgumentParser(description="families on a device that only Python knows")
    parser.add_argument("names", nargs="+", metavar="NAME")
    options = parser.parse_args()
    begin()
    for name in options.names:
        print(json.dumps(outcome(name)), flush=True)


def outcomes(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return each name's ``outcome``, from a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fake_gpu", *names], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


if __name__ == "__main__":
    main()
