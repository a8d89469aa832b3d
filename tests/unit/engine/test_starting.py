"""An engine that is waited for: its host, and what it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from penstock.core import ConfigError
from penstock.engine import opening
from penstock.engine.opening import Start, loaded, watched
from penstock.engine.options import EngineOptions
from penstock.messages import Loading, Started


class FakeExecutor:
    """A stand-in for the executor that ``watched`` makes; starts no process."""

    made: ClassVar[list[FakeExecutor]] = []

    def __init__(self, transport: str, stage_timeout: float | None, on_loading: Any) -> None:
        self.on_loading = on_loading
        self.closed = False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("error", [None, ConfigError("model: no"), KeyboardInterrupt()])
def test_a_host_whose_engine_does_not_start_is_closed(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    def engine(host: FakeExecutor, **options: Any) -> FakeExecutor:
        host.on_loading("", "stage", Loading(stage=0, read=1, total=2))
        host.on_loading("", "stage", Started(stage=0, address="a", kv_bytes=5, weight_bytes=7))
        if error is not None:
            raise error
        return host

    monkeypatch.setattr(opening, "ProcessExecutor", FakeExecutor)
    if error is None:
        host, start = watched(engine, EngineOptions())
        assert not host.closed
        assert (start.weight_bytes, start.kv_bytes) == (7, 5)
    else:
        with pytest.raises(type(error)):
            watched(engine, EngineOptions())
        assert FakeExecutor.made[-1].closed


@pytest.mark.parametrize(("quantization", "form"), [("int4", "int4"), ("none", "float32")])
def test_memory_and_time(quantization: str, form: str) -> None:
    options = SimpleNamespace(dtype="float32")
    checkpoint = SimpleNamespace(num_layers=30)
    setup: Any = SimpleNamespace(
        options=options,
        checkpoint=checkpoint,
        quantization=quantization,
        stages=2,
        groups=(("",), ("",)),
        capacity=8192,
    )
    assert loaded(setup, Start(4.21, 97_400_000, 188_743_680), "exact") == (
        f"30 layers in {form}, exact numerics, 2 stages · 97 MB of weights, 189 MB for 8,192 tokens · loaded in 4.2 s"
    )
