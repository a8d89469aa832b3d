"""What ``penstock generate`` says of a completion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from penstock import ConfigError, generate
from penstock.core import CompletionOutput
from penstock.engine.options import EngineOptions
from penstock.generate import metrics_of, statistics_line
from penstock.messages import Loading
from penstock.speculation import SpeculativeConfig


def said(strategy: str | None, plain_s: float) -> str:
    """Of 11 tokens, one at once and ten a second."""
    speculation = SpeculativeConfig(method="ngram", strategy=strategy) if strategy is not None else None
    setup: Any = SimpleNamespace(speculation=speculation, stages=2, cluster=None)
    completion = CompletionOutput(0, list(range(11)), seconds=1.5, first_token_seconds=0.5)
    return statistics_line(metrics_of(setup, completion, 2.04, plain_s))


@pytest.mark.parametrize("strategy", ["auto", "continuous"])
def test_the_speed_stands_beside_plain_decodings_where_that_was_measured(strategy: str) -> None:
    assert said(strategy, 0.08).startswith("11 tokens, 10.0 tokens/s, about 0.80x plain decoding · ")
    assert said(strategy, 0.0).startswith("11 tokens, 10.0 tokens/s · ")


def test_loading_is_told_from_the_prompt() -> None:
    assert "first token after 0.50 s · loaded in 2.0 s" in said("auto", 0.0)


def test_plain_decoding_is_beside_nothing() -> None:
    assert "plain" not in said(None, 0.08)


class FakeHost:
    """What ``started`` makes, without a process."""

    made: ClassVar[list[FakeHost]] = []

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
    def engine(host: FakeHost, **options: Any) -> FakeHost:
        host.on_loading("stage", Loading(stage=0, read=1, total=2))
        if error is not None:
            raise error
        return host

    monkeypatch.setattr(generate, "ProcessHost", FakeHost)
    monkeypatch.setattr("penstock.engine.llm.LLM", engine)
    if error is None:
        assert not generate.started(EngineOptions()).closed
    else:
        with pytest.raises(type(error)):
            generate.started(EngineOptions())
        assert FakeHost.made[-1].closed
