"""The options of ``penstock profile``, and those of ``penstock plan`` for real hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.config import FieldError, check
from penstock.engine.options import Dtype, EngineOptions, Insecure, KeysFolder, Quantization
from penstock.hosts.placement import check_named
from penstock.options import MODEL, PIPELINE, Option


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """A model, its dtype and quantization, and the hosts that it is measured on. Raises FieldError."""

    model: str | None = None
    hosts: Annotated[
        str | None,
        Option(
            "Hosts on which `penstock worker` runs; localhost is this one.",
            PIPELINE,
            metavar="HOST[:PORT],...",
            default="",
        ),
    ] = None
    keys: KeysFolder = None
    insecure: Insecure = False
    dtype: Dtype = "float32"
    quantization: Quantization = "auto"
    device: Annotated[str, Option("cpu, cuda or cuda:N, on every host.", MODEL)] = "cpu"
    threads: Annotated[
        int | None, Option("Threads that a stage computes with.", PIPELINE, default="all cores of its host")
    ] = None
    max_model_len: Annotated[
        int | None,
        Option("Most tokens of a text, behind which layers are measured.", MODEL, default="the checkpoint's, to 4096"),
    ] = None

    def __post_init__(self) -> None:
        check_named(self.hosts)

    def engine_options(self) -> EngineOptions:
        """The options of an engine that would run the model on these hosts. Raises FieldError."""
        assert self.model is not None
        return EngineOptions(
            model=self.model,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            max_model_len=self.max_model_len,
            hosts=self.hosts,
            keys=self.keys,
            insecure=self.insecure,
            threads=self.threads,
            speculative_config=None,
        )


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(HostsOptions):
    """A model and the hosts that it is measured on, by default this one; or a cluster file with prices. Raises
    FieldError."""

    model: Annotated[
        str | None,
        Option(
            "Checkpoint folder, GGUF file or hub id; with a cluster file a priced model's name.",
            MODEL,
            positional=True,
            default="",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            "Measure with these texts, one JSON object a line with 'prompt' or 'turns'. Only mixtures of experts take "
            "other times for other texts.",
            MODEL,
            metavar="FILE.jsonl",
            default="any tokens",
        ),
    ] = None
    cluster: Annotated[
        str | None, Option("Measure nothing: what the prices of this cluster file come to.", PIPELINE, default="")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster is not None:
            for name in ("hosts", "prompts"):
                value = getattr(self, name)
                check(value is None, name, value, "left out with a cluster file: nothing is measured")
        elif self.model is None:
            raise FieldError("model", "is missing: name the checkpoint to measure, or a cluster file")
