"""A device's rates are those of what was multiplied."""

from __future__ import annotations

import pytest
import torch

from penstock.hosts import probe


def test_rates_are_made_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SHAPES", ((probe.HIDDEN, 4), (4, probe.HIDDEN)))
    monkeypatch.setattr(probe, "seconds_of", lambda weights, rows: 0.5 + rows / 256)
    found = probe.measured("cpu", torch.get_num_threads())
    assert found.rows_per_second == {rows: rows / (0.5 + rows / 256) for rows in probe.ROWS}
    assert found.weight_bandwidth_gb_s == pytest.approx(probe.BYTES / 1e9 / (0.5 + 1 / 256))
    assert found.compute_tflops == pytest.approx(2 * probe.NUMBERS * 128 / 1e12)


def test_every_matrix_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "HIDDEN", 8)
    monkeypatch.setattr(probe, "INNER", 16)
    weights = [torch.ones(8, 8), torch.ones(16, 8), torch.ones(8, 16)]
    assert probe.seconds_of(weights, rows=3) > 0
