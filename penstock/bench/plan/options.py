"""The options of ``penstock plan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from penstock.bench.options import Bandwidth
from penstock.bench.profile.options import HostsOptions
from penstock.config import FieldError, check, known_name
from penstock.options import MODEL, OUTPUT, PIPELINE, Option

GOALS: Final = ("latency", "throughput", "ttft")
METHODS: Final = ("penstock", "jupiter")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(HostsOptions):
    """The devices, the model, the goal, and how plans are judged. Raises FieldError."""

    cluster: Annotated[
        str | None, Option("Preset, random-SEED[:STAGES], or a file ending in .toml.", PIPELINE, default="")
    ] = None
    doctor: Annotated[
        Path | None,
        Option(
            "Plan for real hosts: what 'penstock doctor --json' has printed of them.",
            PIPELINE,
            metavar="FILE.json",
            default="",
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "A priced model's name, in place of the cluster's as_model; of real hosts the checkpoint.",
            MODEL,
            default="the cluster's",
        ),
    ] = None
    goal: Annotated[
        str,
        Option(
            "latency: the whole answer of one request soonest; throughput: most tokens per second of many at a time; "
            "ttft: the first token soonest.",
            PIPELINE,
        ),
    ] = "latency"
    method: Annotated[
        str,
        Option("penstock: chooses devices and their order; jupiter: the paper's, all in the file's order.", PIPELINE),
    ] = "penstock"
    prompt_tokens: Annotated[int, Option("Tokens of the prompt that is simulated.", PIPELINE)] = 128
    tokens: Annotated[
        int, Option("Tokens that each plan is simulated for; 0 judges by the slowest stage alone.", PIPELINE)
    ] = 64
    bandwidth_gbit_s: Bandwidth = None
    output: Annotated[
        Path | None,
        Option("Write the cluster file with the plan's stages.", OUTPUT, names=("--output", "-o"), metavar="FILE.toml"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if [self.cluster, self.doctor, self.hosts].count(None) != 2:
            raise FieldError("cluster", "or hosts or doctor has to be given, and only one of them: what is planned for")
        if self.real:
            check(self.model is not None, "model", None, "the checkpoint that the hosts are to run")
            check(self.bandwidth_gbit_s is None, "bandwidth_gbit_s", self.bandwidth_gbit_s, "left out: links are real")
            check(self.output is None, "output", str(self.output), "left out: the plan of real hosts is two options")
        known_name(self.goal, GOALS, "goal")
        known_name(self.method, METHODS, "method")
        check(self.prompt_tokens >= 1, "prompt_tokens", self.prompt_tokens, "at least 1")
        check(self.tokens == 0 or self.tokens >= 2, "tokens", self.tokens, "0, or at least 2")
        if self.output is not None:
            check(self.output.suffix == ".toml", "output", str(self.output), "a file that ends in .toml")
            check(self.output.parent.is_dir(), "output", str(self.output), "in a folder that exists")

    @property
    def real(self) -> bool:
        """Whether the plan is for real hosts."""
        return self.cluster is None
