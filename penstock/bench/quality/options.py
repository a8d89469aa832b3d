"""The options of ``penstock bench quality``, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from penstock.bench.options import FiguresFile
from penstock.clients.api import Server
from penstock.config import FieldError, check
from penstock.engine.options import Dtype, EngineOptions, ModelName, Quantization, Stages, Threads
from penstock.options import OUTPUT, SAMPLING, SERVER, Option

MODES: Final = ("on", "auto")


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """The model whose answers are compared, the questions, and the judge. Raises FieldError."""

    model: ModelName = EngineOptions.model
    dtype: Dtype = EngineOptions.dtype
    quantization: Quantization = EngineOptions.quantization
    pipeline_parallel_size: Stages = None
    threads: Threads = None
    prompts: Annotated[
        tuple[Path, ...],
        Option(
            "One JSON object a line, with 'prompt' or 'turns', of which the first is asked, and perhaps a 'category'. "
            "May be repeated.",
            SAMPLING,
            metavar="FILE.jsonl",
            default="",
        ),
    ] = ()
    num_prompts: Annotated[int, Option("How many of each category of a file to ask.", SAMPLING)] = 4
    max_tokens: Annotated[int, Option("Most tokens per answer.", SAMPLING)] = 256
    outline_decoding: Annotated[
        str,
        Option(
            "on: every question is answered in points as well; auto: those that the model calls lists.",
            SAMPLING,
            metavar="on|auto",
        ),
    ] = "on"
    judge: Annotated[
        str | None,
        Option(
            "An OpenAI-compatible server that rates both answers and compares them in both orders.",
            SERVER,
            metavar="URL",
            default="none",
        ),
    ] = None
    judge_model: Annotated[
        str | None, Option("One of the models that the judge serves.", SERVER, default="the first it names")
    ] = None
    judge_key_file: Annotated[
        Path | None, Option("A file with the key that the judge wants.", SERVER, metavar="FILE", default="")
    ] = None
    json: FiguresFile = None
    answers: Annotated[
        Path | None,
        Option("Write every question with its answers and verdicts.", OUTPUT, metavar="FILE.jsonl", default=""),
    ] = None

    def __post_init__(self) -> None:
        check(bool(self.prompts), "prompts", self.prompts, "at least one file")
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        check(self.outline_decoding in MODES, "outline_decoding", self.outline_decoding, " or ".join(MODES))
        for name in ("json", "answers"):
            file: Path | None = getattr(self, name)
            check(file is None or file.parent.is_dir(), name, str(file), "in a folder that exists")
        if self.judge is None:
            for name in ("judge_model", "judge_key_file"):
                check(getattr(self, name) is None, name, getattr(self, name), "left out where there is no judge")
        _ = self.server  # raises FieldError where judge is no address

    @property
    def server(self) -> Server | None:
        """The judge's server. Raises FieldError where ``judge`` is no address."""
        if self.judge is None:
            return None
        try:
            return Server(url=self.judge, api_key_file=self.judge_key_file)
        except FieldError as error:
            raise FieldError("judge", str(error).removeprefix("url ")) from error

    @property
    def engine(self) -> EngineOptions:
        return EngineOptions(
            model=self.model,
            dtype=self.dtype,
            quantization=self.quantization,
            pipeline_parallel_size=self.pipeline_parallel_size,
            threads=self.threads,
            speculative_config=None,
        )
