"""Options about output that several commands have."""

from __future__ import annotations

from typing import Annotated

from penstock.options import Option

AsJson = Annotated[bool, Option("Print one JSON object and nothing else.", names=("--json",))]
