"""Metrics that the server itself counts."""

from __future__ import annotations

from typing import Any

from penstock.server.http.middleware import Record
from penstock.server.metrics import ServerMetrics
from tests.unit.server.live.test_routes import Engine


def test_methods_that_clients_make_up_are_one_series() -> None:
    """Each series stays in memory for good."""
    engine: Any = Engine()
    metrics = ServerMetrics(engine, "m")
    for method in ("GET", "MADE", "UP"):
        metrics.responded(Record("x", method, "/", "", 405))
    counted = {
        sample.labels["method"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "penstock:http_responses_total"
    }
    assert counted == {"GET": 1, "other": 2}
