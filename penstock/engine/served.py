"""The engine as a server sees it, whether it runs in the server's process or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.core import SamplingParams
from penstock.engine.job import Prompt
from penstock.engine.resolve import Resolved
from penstock.engine.stats import EngineStats
from penstock.engine.stream import OutlineStream, ServedStream
from penstock.outlines.dialogue import Dialogue
from penstock.outlines.steps import Step, Steps
from penstock.text.tokenizer import Tokenizer


class ServedEngine(Protocol):
    """The methods of ``AsyncLLM`` that a server needs; each is described there."""

    @property
    def setup(self) -> Resolved: ...

    @property
    def numerics(self) -> str: ...

    def get_tokenizer(self) -> Tokenizer: ...

    def get_default_sampling_params(self) -> SamplingParams: ...

    async def prepare(self, sampling_params: SamplingParams) -> None: ...

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> ServedStream: ...

    async def resume(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        resumed: Sequence[Sequence[int]],
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> ServedStream: ...

    def submit_in_points(
        self,
        prompt: Mapping[str, Any],
        steps: Steps,
        first: Step,
        aside: Callable[..., Any],
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> OutlineStream: ...

    def steps(self, dialogue: Dialogue, params: SamplingParams, mode: str) -> Steps: ...

    def stats(self) -> EngineStats: ...

    async def check_health(self) -> None: ...

    async def rebalance(self) -> bool: ...
