"""Progress of loading, as lines in a server's log."""

from __future__ import annotations

import logging
import time

from penstock.pipeline.loading import LoadingCount
from penstock.progress import LINE_EVERY

log = logging.getLogger("penstock.server")


class LoadingLog(LoadingCount):
    """A progress that logs a line every few seconds while weights are read."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = time.monotonic()

    def show(self, host: str, does: str, done: int, total: int) -> None:
        if time.monotonic() - self._logged_at >= LINE_EVERY:
            self._logged_at = time.monotonic()
            where = {"host": host} if host else {}
            log.info(does, extra={"fields": where | {"percent": round(100 * done / max(1, total))}})
