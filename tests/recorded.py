"""Records a step on a CPU and repeats it as a CUDA graph would: over the same tensors, without a look at the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostRead(RuntimeError):
    """A step asks for a number amid its operations, for which a graph cannot wait."""


aten = torch.ops.aten
ASKING: Final = (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero)
"""Operations whose result the host has to know before it goes on."""


class Tape(TorchDispatchMode):
    """Notes every operation, with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in ASKING:
            raise HostRead(f"{func} amid a step")
        found = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, [one for one in tree_leaves(found) if isinstance(one, Tensor)]))
        return found

    def play(self) -> None:
        """Repeat the operations over the same tensors. What each has made keeps its place and gets new numbers."""
        for func, args, kwargs, made in self.calls:
            again = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
            for old, new in zip(made, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Tapes:
    """A ``graphs.Recorder`` for CPUs."""

    def __init__(self) -> None:
        self.recorded = 0
        self.played = 0

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        run()
        with Tape() as tape:
            result = run()
        self.recorded += 1

        @torch.inference_mode()
        def play() -> None:
            self.played += 1
            tape.play()

        return play, result
