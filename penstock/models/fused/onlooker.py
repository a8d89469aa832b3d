"""Watches a model's layers at work: the input of each, its call of the attention, and its output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.fused.agreement import identical
from penstock.models.probe import HANDLED, problem_of


@dataclass
class Sight:
    """One layer's call. ``turned`` is the rotary embedding for the rows: cosines and sines."""

    given: Tensor
    turned: Any
    options: dict[str, Any]
    """The other arguments of its call, by their names."""
    asked: tuple[Tensor, ...] = ()
    """Queries, keys and values."""
    scoring: dict[str, Any] = field(default_factory=dict)
    """The other arguments of its attention."""
    problem: str = "it attends to nothing"
    gave: Tensor = field(default_factory=lambda: torch.empty(0))

    def fits(self, turned: Any) -> bool:
        """Whether its heads were rotated over their whole width, by this embedding, and its attention is ordinary."""
        if not (isinstance(self.turned, tuple) and len(self.turned) == len(turned) == 2) or self.problem:
            return False
        query, _, value = self.asked
        whole = self.turned[0].shape[-1] == query.shape[-1] == value.shape[-1]
        return whole and all(map(identical, self.turned, turned))


class Onlooker:
    """Takes the place of the attention meanwhile, as if every row saw only itself."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []

    @contextlib.contextmanager
    def watching(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        hooks = [layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in layers]
        hooks += [layer.register_forward_hook(self._leave) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, _: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.sights.append(Sight(given[0], options.get("position_embeddings"), options))

    def _leave(self, _: nn.Module, __: Any, gave: Any) -> None:
        self.sights[-1].gave = gave[0] if isinstance(gave, tuple) else gave

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        sight = self.sights[-1]
        sight.asked = (query, key, value)
        sight.scoring = {name: options[name] for name in sorted(HANDLED & options.keys())}
        sight.problem = problem_of(mask, options)
        return value.repeat_interleave(len(query) // len(value), dim=0).transpose(0, 1)
