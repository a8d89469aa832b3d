"""Options that several benches share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.bench.entries import split_entries
from penstock.options import MODEL, OUTPUT, PIPELINE, Option

Bandwidth = Annotated[
    float | None,
    Option(
        "Rate of every link between the emulated cluster's hosts, in 1e9 bits/s of payload.",
        PIPELINE,
        default="the cluster's",
    ),
]
DrafterOn = Annotated[
    tuple[str, ...],
    Option(
        "Where the emulated drafter runs: engine, last-stage, or a device's name; several are compared.",
        PIPELINE,
        metavar="PLACE,...",
        default="the cluster's",
        parse=split_entries,
    ),
]
FiguresFile = Annotated[
    Path | None, Option("Write settings and figures.", OUTPUT, names=("--json",), metavar="FILE", default="")
]
ReportFolder = Annotated[
    Path | None,
    Option("Write report.md with tables and plots, and all figures as JSON.", OUTPUT, metavar="DIR", default=""),
]
RecordedModel = Annotated[
    str | None,
    Option("Refuse recordings of another target model or tokenizer than this checkpoint's.", MODEL, default="any"),
]
RecordedDraft = Annotated[
    str | None,
    Option("Refuse recordings of another draft model or tokenizer than this checkpoint's.", MODEL, default="any"),
]
