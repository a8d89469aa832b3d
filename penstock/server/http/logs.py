"""Logs: one JSON object a line on stderr, one line per request."""

from __future__ import annotations

import json
import logging
import logging.config
from datetime import UTC, datetime
from typing import Any, Final

from penstock.server.http.records import Record

log = logging.getLogger("penstock.server.requests")

POLLED: Final = ("/health", "/metrics")
"""Paths that machines ask for all the time: their log lines have the level debug."""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(level: str) -> None:
    """Have Penstock and uvicorn log as JSON on stderr."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
            "loggers": {
                "penstock": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
                # Below warnings uvicorn reports its start and stop, which Penstock's own lines do already.
                "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            },
        }
    )


def log_request(record: Record) -> None:
    """Log one line per request: what was asked, how it ended, and the timings."""
    fields = {
        "request_id": record.request_id,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.seconds, 4),
    }
    if record.error is not None:
        fields["error"] = record.error
    level = logging.DEBUG if record.route in POLLED and record.status == 200 else logging.INFO
    log.log(level, "request", extra={"fields": fields | record.details})
