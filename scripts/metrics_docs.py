"""Write docs/reference/metrics.md, what ``/metrics`` says, from a server's registry.

python scripts/metrics_docs.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import Metric

from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats
from penstock.server.metrics import ServerMetrics

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "metrics.md"
HEAD: Final = """\
# Metrics

`python scripts/metrics_docs.py` writes this page from the server's registry; change that, not this.

`GET /metrics` of `penstock serve` answers in Prometheus' text format. It wants the API key, if there is one. A metric
that vLLM has too carries vLLM's name, with `penstock:` in place of `vllm:`. Times are in seconds. A histogram has
series `_bucket`, `_sum` and `_count`. On Linux the usual `process_` metrics of the server's process come with them.

| metric | type | labels | |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole of docs/reference/metrics.md."""
    found = ServerMetrics(a_server(), "demo").registry.collect()
    rows = [row(one) for one in found if one.name.startswith("penstock:")]
    return HEAD + "\n".join(rows) + "\n"


def a_server() -> Any:
    """Something that has statistics, as a server with one stage that has served."""
    counts: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(EngineStats)}
    one = {
        "finished": {"stop": 1},
        "stage_busy_seconds": [0.0],
        "stage_heard_seconds_ago": [0.0],
        "stage_rank_bytes": [[0, 0]],
        "ended": None,
        "last_step_seconds_ago": 0.0,
    }
    stats = EngineStats(**counts | one)
    return SimpleNamespace(replicas=lambda: [ReplicaStats(0, ReplicaState.UP, None, stats)])


def row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = LABELS.get(metric.name) or [label for label in metric.samples[0].labels if label != "le"]
    return f"| `{name}` | {metric.type} | {', '.join(f'`{label}`' for label in labels)} | {metric.documentation} |"


LABELS: Final = {"penstock:http_responses": ["method", "route", "status"]}
"""Labels of metrics that have no series before the first response."""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
