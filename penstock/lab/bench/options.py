"""The options of ``penstock bench``, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from penstock.config import MODEL, OUTPUT, PIPELINE, SAMPLING, SPECULATION, Option, check
from penstock.engine.options import (
    CLUSTER,
    Dtype,
    EngineOptions,
    Hosts,
    Insecure,
    KeysFolder,
    ModelName,
    Quantization,
    ReplicaCount,
    SpeculativeSlots,
    Stages,
    Threads,
)
from penstock.lab.grid import (
    DEFAULT_PROMPTS,
    PLAIN,
    Bandwidth,
    DrafterOn,
    FiguresFile,
    ReportFolder,
    check_written,
    parse_temperatures,
    split_entries,
)
from penstock.strategies.base import STRATEGIES

OF_ONE_ENGINE: Final = ("cluster", "drafter_on", "peer", "report", "record")
"""Fields whose measurements follow one engine, request by request."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The strategies to compare, the engine, and the prompts. Raises FieldError."""

    strategies: Annotated[
        tuple[str, ...],
        Option(
            f"{', '.join(STRATEGIES)}; each with options of its own in brackets, for example "
            "pipedec[width=16],pipedec[width=64].",
            SPECULATION,
            metavar="A,B[option=value,...],...",
            parse=split_entries,
            values=tuple(STRATEGIES),
        ),
    ] = (PLAIN, "auto")
    speculative_config: Mapping[str, Any] | None = None
    """The drafter, and options of all strategies that have them."""
    speculative_slots: SpeculativeSlots = EngineOptions.speculative_slots
    model: ModelName = EngineOptions.model
    dtype: Dtype = EngineOptions.dtype
    quantization: Quantization = EngineOptions.quantization
    peer: Annotated[
        tuple[str, ...],
        Option(
            "hf (transformers' generate), llama.cpp, or llama.cpp-native (built for this processor: make peers): the "
            "same model, prompts, tokens and threads, in the same run.",
            MODEL,
            metavar="NAME,...",
            default="none",
            parse=split_entries,
        ),
    ] = ()
    cluster: Annotated[str | None, CLUSTER] = None
    hosts: Hosts = None
    keys: KeysFolder = None
    insecure: Insecure = False
    threads: Threads = None
    pipeline_parallel_size: Stages = None
    data_parallel_size: ReplicaCount = 1
    time_scale: Annotated[
        float | None,
        Option("Stretch all modelled times, where this host is too slow for them.", PIPELINE, default="the cluster's"),
    ] = None
    bandwidth_gbit_s: Bandwidth = None
    drafter_on: DrafterOn = ()
    prompts: Annotated[
        tuple[Path, ...],
        Option(
            "One JSON object a line, with 'prompt' or, to follow as a conversation, 'turns'. May be repeated: a prompt "
            "set each.",
            SAMPLING,
            metavar="FILE.jsonl",
            default="the package's own",
        ),
    ] = (DEFAULT_PROMPTS,)
    raw: Annotated[
        bool, Option("Continue prompts as they stand, with chat models too; of turns the first.", SAMPLING)
    ] = False
    num_prompts: Annotated[int, Option("How many of each file to use.", SAMPLING)] = 4
    max_tokens: Annotated[int, Option("Most tokens per prompt.", SAMPLING)] = 64
    temperature: Annotated[
        tuple[float, ...], Option("0 is greedy.", SAMPLING, metavar="T,T,...", parse=parse_temperatures)
    ] = (0.0,)
    top_p: Annotated[float, Option("1 is off.", SAMPLING)] = 1.0
    top_k: Annotated[int, Option("0 is off.", SAMPLING)] = 0
    seed: Annotated[int, Option("The first prompt's; the next one has the next.", SAMPLING)] = 0
    seeds: Annotated[int, Option("How often to run each prompt, each time with another seed.", SAMPLING)] = 1
    json: FiguresFile = None
    report: ReportFolder = None
    record: Annotated[
        Path | None,
        Option(
            "Record target's and draft model's distributions on the texts; see penstock acceptance.",
            OUTPUT,
            metavar="FILE.safetensors",
            default="",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(bool(self.strategies), "strategies", self.strategies, "at least one name")
        check(bool(self.prompts), "prompts", self.prompts, "at least one file")
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.max_tokens >= 2, "max_tokens", self.max_tokens, "at least 2: the first token is the prompt's")
        check(self.seeds >= 1, "seeds", self.seeds, "at least 1")
        for name in ("strategies", "temperature", "drafter_on", "peer"):
            values = getattr(self, name)
            check(len(set(values)) == len(values), name, ",".join(map(str, values)), "different ones")
        check(self.data_parallel_size >= 1, "data_parallel_size", self.data_parallel_size, "at least 1")
        wanted = "left out with data_parallel_size: its figures are one engine's"
        for name in OF_ONE_ENGINE if self.data_parallel_size > 1 else ():
            check(not getattr(self, name), name, getattr(self, name), wanted)
        check_written(self, "json")
