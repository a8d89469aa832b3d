"""``penstock acceptance``: which requests count, what is exact, and what is printed."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from penstock.core import ConfigError
from penstock.lab import acceptance
from penstock.lab import acceptance as rules
from penstock.lab.acceptance import evaluate, mean_over, run_acceptance
from penstock.lab.record import Recording
from tests.recordings import make_recording


def evaluated(recording: Recording) -> rules.Evaluation:
    return evaluate(Path("a.safetensors"), recording)


def with_tokens(recording: Recording, tokens: np.ndarray) -> Recording:
    return replace(recording, tokens=tokens.astype(np.int32))


def test_every_rule_is_evaluated_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = make_recording((30, 25))
    rows = np.arange(55)
    p, q = acceptance.distributions(recording, rows)
    monkeypatch.setattr(rules, "BLOCK", 20)  # the last block is a smaller one
    found = evaluated(recording).rules
    assert list(found) == ["shared_noise", "looked_up", "rejection", "rejection_without_replacement"]
    assert found["rejection"][4].value == pytest.approx(acceptance.rejection(p, q, 4)[:, 3].mean())
    assert found["rejection"][4].error is None
    assert found["rejection_without_replacement"][1].value == pytest.approx(found["rejection"][1].value)
    assert found["rejection_without_replacement"][1].error is None
    assert found["rejection_without_replacement"][4].error is not None
    assert found["looked_up"][2].value == pytest.approx(recording.target_of_draft[:, :2].sum() / 55)
    hits = (recording.candidates[:, :8] == recording.tokens[:, None]).any(axis=1).mean()
    assert found["shared_noise"][8].value == pytest.approx(hits)
    assert found["shared_noise"][8].error == pytest.approx(math.sqrt(hits * (1 - hits) / 55))


def test_greedy_recordings_have_one_rule_without_an_error() -> None:
    recording = make_recording((30, 25), temperature=0.0)
    evaluation = evaluated(recording)
    assert list(evaluation.rules) == list(evaluation.chains) == ["greedy"]
    best = recording.draft_ids[:, :4] == recording.tokens[:, None]
    assert evaluation.rules["greedy"][4] == rules.Figure(pytest.approx(best.any(axis=1).mean()), None)


def test_looping_outputs_are_left_out() -> None:
    recording = make_recording((30, 25))
    looping = recording.tokens.copy()
    looping[:30] = 7
    evaluation = evaluated(with_tokens(recording, looping))
    assert (evaluation.requests, evaluation.tokens, evaluation.looping) == (2, 25, 1)
    hits = (recording.candidates[30:, 0] == recording.tokens[30:]).mean()
    assert evaluation.rules["shared_noise"][1].value == pytest.approx(hits)
    with pytest.raises(ConfigError, match=r"a\.safetensors: tokens: none is left"):
        evaluated(with_tokens(recording, np.full(55, 7)))


def test_chains_stay_within_a_request_and_have_no_figure_where_none_is_long_enough() -> None:
    recording = make_recording((5, 3))
    chains = evaluated(recording).chains["shared_noise"]
    assert list(chains) == [1, 2, 4]
    hits = recording.candidates[:, 0] == recording.tokens
    pairs = [hits[i] * (1 + hits[i + 1]) for i in (0, 1, 2, 3, 5, 6)]
    assert chains[2].value == pytest.approx(np.mean(pairs))


def test_errors_are_over_requests() -> None:
    even = mean_over([np.array([1.0, 3.0]), np.array([3.0, 1.0])])
    assert (even.value, even.error) == (2.0, 0.0)
    assert mean_over([np.array([1.0]), np.array([3.0])]).error == pytest.approx(math.sqrt(2) / math.sqrt(2))
    assert mean_over([np.array([1.0, 2.0])]).error is None


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = {"warm": make_recording((30, 25)), "cold": make_recording((30, 25), temperature=0.0)}
    for name, recording in made.items():
        recording.save(tmp_path / f"{name}.safetensors")
    return [tmp_path / f"{name}.safetensors" for name in made]


def test_tables_name_file_settings_and_every_rule(files: list[Path]) -> None:
    console = Console(file=io.StringIO(), width=160)
    run_acceptance(files, as_json=False, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "warm.safetensors: 55 tokens, temperature 1" in text
    assert "cold.safetensors: 55 tokens, temperature 0" in text
    assert all(label in text for label in rules.LABELS.values())
    assert "±" in text
    assert "k = 16" in text


def test_json_has_the_figures_and_nothing_else(files: list[Path]) -> None:
    console = Console(file=io.StringIO(), width=160)
    evaluations = run_acceptance(files, as_json=True, console=console)
    report = json.loads(console.file.getvalue())  # type: ignore[attr-defined]
    warm, cold = report["recordings"]
    assert (warm["file"], warm["tokens"], warm["settings"]["top_p"]) == ("warm.safetensors", 55, 1.0)
    assert warm["rules"]["rejection"]["4"]["value"] == evaluations[0].rules["rejection"][4].value
    assert cold["rules"].keys() == {"greedy"}


def test_no_file_is_evaluated_when_one_is_no_recording(files: list[Path], tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    (tmp_path / "x.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"x\.safetensors"):
        run_acceptance([*files, tmp_path / "x.safetensors"], as_json=False, console=console)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
