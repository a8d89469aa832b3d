"""A device's rates are those of what was multiplied."""

from __future__ import annotations

import pytest
import torch

from penstock.hosts.doctor import rates


def test_rates_are_made_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SHAPES", ((rates.HIDDEN, 4), (4, rates.HIDDEN)))
    monkeypatch.setattr(rates, "seconds_of", lambda weights, rows: 0.5 + rows / 256)
    found = rates.measured("cpu", torch.get_num_threads())
    assert found.rows_per_second == {rows: rows / (0.5 + rows / 256) for rows in rates.ROWS}
    assert found.weight_bandwidth_gb_s == pytest.approx(rates.BYTES / 1e9 / (0.5 + 1 / 256))
    assert found.compute_tflops == pytest.approx(2 * rates.NUMBERS * 128 / 1e12)


def test_every_matrix_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "HIDDEN", 8)
    monkeypatch.setattr(rates, "INNER", 16)
    weights = [torch.ones(8, 8), torch.ones(16, 8), torch.ones(8, 16)]
    assert rates.seconds_of(weights, rows=3) > 0
