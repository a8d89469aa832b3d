"""The options of ``penstock simulate``, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from penstock.bench.entries import split_entries
from penstock.bench.options import Bandwidth, DrafterOn, FiguresFile, RecordedDraft, RecordedModel, ReportFolder
from penstock.bench.simulate.sweep import Sweep, parse_sweep
from penstock.config import FieldError, check
from penstock.drafters.synthetic import check_accuracy
from penstock.options import PIPELINE, SAMPLING, SPECULATION, Option
from penstock.strategies.registry import STRATEGIES


def parse_accuracy(text: str) -> tuple[float, ...]:
    """The numbers in ``0.7,0.8``. Raises FieldError for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise FieldError("accuracy", f"is {text!r}; it has to be numbers with commas, for example 0.7,0.8") from None


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The strategies and clusters to simulate, and the source of tokens and drafts. Raises FieldError."""

    clusters: Annotated[
        tuple[str, ...],
        Option(
            "Preset, random-SEED[:STAGES], or a file ending in .toml. May be repeated.",
            PIPELINE,
            names=("--cluster",),
            default="",
        ),
    ]
    strategies: Annotated[
        tuple[str, ...],
        Option(
            f"{', '.join(STRATEGIES)}; each with options of its own in brackets.",
            SPECULATION,
            metavar="A,B[option=value,...],...",
            parse=split_entries,
        ),
    ] = ("static_tree", "pipedec", "auto")
    accuracy: Annotated[
        tuple[float, ...] | None,
        Option(
            "Chance that the target's token is among the drafter's first 1, 2, ... candidates.",
            SPECULATION,
            metavar="P,P,...",
            default="the demo pair's at T = 1",
            parse=parse_accuracy,
        ),
    ] = None
    recordings: Annotated[
        tuple[Path, ...],
        Option(
            "Take tokens and drafts from what penstock bench --record wrote. May be repeated.",
            SPECULATION,
            names=("--recording",),
            metavar="FILE.safetensors",
            default="",
        ),
    ] = ()
    model: RecordedModel = None
    draft_model: RecordedDraft = None
    tokens: Annotated[int, Option("Tokens per strategy, of all requests.", SAMPLING)] = 2000
    """Recordings may have fewer tokens; then all of them are used."""
    tokens_per_request: Annotated[int, Option("Most tokens of one request.", SAMPLING)] = 100
    seed: Annotated[int, Option("Decides which drafts are right.", SAMPLING)] = 0
    bandwidth_gbit_s: Bandwidth = None
    overhead_per_hop_ms: Annotated[
        float, Option("What every message takes beyond its link's time: 'penstock bench' measures it.", PIPELINE)
    ] = 0.0
    drafter_on: DrafterOn = ()
    sweep: Annotated[
        Sweep,
        Option(
            "Go through values that double, for example stages=2..64,width=8..128.",
            PIPELINE,
            metavar="AXIS=FIRST..LAST,...",
            default="",
            parse=parse_sweep,
        ),
    ] = field(default_factory=dict)
    json: FiguresFile = None
    report: ReportFolder = None

    def __post_init__(self) -> None:
        for name in ("clusters", "strategies", "drafter_on"):
            values = getattr(self, name)
            check(bool(values) or name == "drafter_on", name, values, "at least one name")
            check(len(set(values)) == len(values), name, ",".join(values), "different ones")
        if self.accuracy is not None:
            check_accuracy(self.accuracy)
            if self.recordings:
                raise FieldError("accuracy", "is set beside a recording, which has its own; remove one")
        for name in ("model", "draft_model"):
            if getattr(self, name) is not None and not self.recordings:
                raise FieldError(name, "is what recordings have to be made with, but there are none; add --recording")
        check(self.tokens_per_request >= 2, "tokens_per_request", self.tokens_per_request, "at least 2")
        check(self.tokens >= self.tokens_per_request, "tokens", self.tokens, "at least tokens_per_request")
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        check(self.overhead_per_hop_ms >= 0, "overhead_per_hop_ms", self.overhead_per_hop_ms, "0 or above")
        if self.json is not None:
            check(self.json.parent.is_dir(), "json", str(self.json), "in a folder that exists")
