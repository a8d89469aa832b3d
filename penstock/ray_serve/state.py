"""The state of the ingress process that Serve's router and the server's metrics share."""

from __future__ import annotations

from typing import Final

from penstock.ray_serve.reports import Reports

REPORTS: Final = Reports()
"""The last report of every replica."""
