"""The parts ``start``, ``many``, ``pipeline`` and ``layers``: whole engines, with stages as processes on one device."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

import torch
from rich.console import Console
from transformers import CONFIG_MAPPING, AutoConfig

from benchmarks.costs.step import CONTEXT, decoded
from benchmarks.gpu.devices import free_bytes, is_gpu
from benchmarks.gpu.drawn import drawn_model, main_model
from benchmarks.gpu.sizes import Sizes, sizes_of
from benchmarks.gpu.steps import DTYPE, TOKEN
from benchmarks.shared.timed_parts import Findings
from penstock import LLM, SamplingParams
from penstock.checkpoint.architectures import model_class
from penstock.engine.loop import Observer
from penstock.engine.profile.measure import needed_bytes
from penstock.lab.bench.comparison import measure as measure_strategies
from penstock.lab.profile import ProfileOptions, run_profile
from penstock.messages import Result
from penstock.pipeline.processes import ProcessExecutor
from penstock.requests.slots import BLOCK
from tests.checkpoints import ARCHITECTURES, FURTHER, RECURRENT, UNUSUAL, settings_of
from tests.relatives import RELATIVES

FAMILIES: Final = (*ARCHITECTURES, *FURTHER, *RECURRENT, *UNUSUAL, *RELATIVES)
KILLED_AFTER: Final = 4
"""Results after which a stage is killed."""
PROMPTS: Final = [{"prompt_token_ids": [TOKEN + i, *range(20, 50)]} for i in range(2)]


# --------------------------------------------------------------------------------------------------------------- start


def start(options: argparse.Namespace, findings: Findings) -> None:
    """Seconds until stages have started, and memory by step. Before that: whose import touches the driver."""
    sizes, device = sizes_of(options), options.device
    with findings.trying("imports"):
        findings.add("imports", imports(FAMILIES[: sizes.architectures] if options.tiny else FAMILIES, device))
    for place in dict.fromkeys(("cpu", device)):
        with findings.trying(f"demo, {place}"):
            findings.add(f"demo, {place}", started("demo", place, {"pipeline_parallel_size": 2}))
    with findings.trying("model"):
        name = main_model(options, sizes)
        with drawn_model(name, options, sizes, findings) as folder:
            own = {"skip_tokenizer_init": True, "dtype": DTYPE, "max_model_len": 1024}
            findings.add("model", {"name": name, **started(folder, device, own)})


def imports(names: tuple[str, ...], device: str) -> dict[str, Any]:
    """Architectures whose import starts the driver: after that, no forked process could use the device."""
    began = torch.cuda.is_initialized()
    touching: list[str] = []
    for name in names:
        settings = settings_of(name)
        if settings["model_type"] in CONFIG_MAPPING:  # a release of transformers may lack some
            model_class(AutoConfig.for_model(**settings))
        if not began and not touching and torch.cuda.is_initialized():
            touching.append(name)
    found = {"architectures": len(names), "touching": touching}
    return found | ({"forked_child_can_use_it": forked_can_use(device)} if is_gpu(device) else {})


def forked_can_use(device: str) -> bool:
    """Whether a child that this process forks can still use the device."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        torch.zeros(1, device=device).item()
        os._exit(0)
    finally:
        os._exit(1)


def started(model: str, device: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's start: seconds, and on a GPU its bytes as predicted and as taken."""
    memory = [free_bytes(device)] if is_gpu(device) else []
    begun = time.monotonic()
    with LLM(model, device=device, speculative_config=None, **own) as llm:
        found: dict[str, Any] = {"start_s": time.monotonic() - begun, "predicted_bytes": sum(needed_bytes(llm.setup))}
        memory += [free_bytes(device)] if memory else []
        (output,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        found["first_token_s"] = output.outputs[0].first_token_seconds
        memory += [free_bytes(device)] if memory else []
    if memory:
        before, loaded, decoding = memory
        taken = {"loaded_bytes": before - loaded, "decoding_bytes": before - decoding}
        found |= taken | {"left_behind_bytes": before - free_bytes(device)}
    return found


# ------------------------------------------------------------------------------------------------- many, and pipelines


def many(options: argparse.Namespace, findings: Findings) -> None:
    """A step's time, and tokens per second of plain decoding, by the number of requests at a time."""
    sizes = sizes_of(options)
    name = main_model(options, sizes)
    findings.add("model", name)
    most = max(sizes.requests)
    # All run at a time only if there are slots for all, each with a block that is not full.
    slots = max(4096, most * (CONTEXT + sizes.tokens + BLOCK))
    own = {"dtype": DTYPE, "device": options.device, "max_num_seqs": most, "kv_slots": slots}
    with drawn_model(name, options, sizes, findings) as folder:
        for requests in sizes.requests:
            label = "1 request" if requests == 1 else f"{requests} requests"
            with findings.trying(label):
                findings.add(label, decoded(folder, 1, requests, sizes.tokens, own))


def pipeline(options: argparse.Namespace, findings: Findings) -> None:
    """Several stages on one device: a hop's time by transport, one stage's tokens, and a stage that is killed.

    Stages take turns on the device, so that no throughput of a pipeline is shown.
    """
    sizes = sizes_of(options)
    name = sizes.mains[-1]  # a hop's cost does not depend on the weights
    findings.add("model", name)
    expected: list[list[int]] = []
    usual, *others = sizes.transports
    cases = [*((stages, usual) for stages in sizes.stages), *((2, transport) for transport in others)]
    with drawn_model(name, options, sizes, findings) as folder:
        with findings.trying("a stage is killed"):
            findings.add("a stage is killed", killed(folder, options.device, sizes))
        for stages, transport in cases:
            label = f"{'1 stage' if stages == 1 else f'{stages} stages'}, {transport}"
            with findings.trying(label), over(folder, options.device, stages, transport) as (llm, start_s):
                params = [SamplingParams(temperature=0, max_tokens=sizes.tokens, ignore_eos=True)] * len(PROMPTS)
                (run,) = measure_strategies(llm, PROMPTS, params, [("autoregressive", None)])
                ids = [list(output.outputs[0].token_ids) for output in run.outputs]
                expected = expected or ids
                found = {"start_s": start_s, "tokens_per_second": run.tokens_per_second}
                found |= {"hop_ms": run.overhead_per_hop_ms, "loop_ms": run.overhead_per_loop_ms}
                findings.add(label, {**found, "stage_busy": run.stage_busy, "same_tokens": ids == expected})


@contextmanager
def over(folder: str, device: str, stages: int, transport: str) -> Iterator[tuple[LLM, float]]:
    """An engine over so many stages, and the seconds that its start has taken."""
    begun = time.monotonic()
    with LLM(
        folder,
        pipeline_parallel_size=stages,
        transport=transport,
        device=device,
        dtype=DTYPE,
        max_model_len=1024,
        skip_tokenizer_init=True,
        speculative_config=None,
        enable_prefix_caching=False,
    ) as llm:
        yield llm, time.monotonic() - begun


class Kill(Observer):
    """Kills a stage after so many results. ``seconds``: from then until the next result, None before that."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._results = 0
        self._at = 0.0
        self.seconds: float | None = None

    def arrived(self, result: Result, at: float) -> None:
        self._results += 1
        if self._results == KILLED_AFTER:
            host = self._llm.host
            assert isinstance(host, ProcessExecutor)
            process = next(iter(host._processes.values()))
            self._at = time.monotonic()
            process.launcher.kill(process.name)
        elif self._at and self.seconds is None:
            self.seconds = time.monotonic() - self._at


def killed(folder: str, device: str, sizes: Sizes) -> dict[str, Any]:
    """Kill a stage of two amid two requests. Its memory has to be free again, and the tokens those of before."""
    params = SamplingParams(temperature=0, max_tokens=sizes.tokens, ignore_eos=True)
    before = free_bytes(device)
    with over(folder, device, 2, sizes.transports[0]) as (llm, _):
        expected = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
        loaded, kill = free_bytes(device), Kill(llm)
        with llm.observing(kill):
            ids = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
        again = free_bytes(device)
    found: dict[str, Any] = {"recovery_s": kill.seconds, "same_tokens": ids == expected}
    if is_gpu(device):
        after = {"after_recovery_bytes": before - again, "left_behind_bytes": before - free_bytes(device)}
        found |= {"loaded_bytes": before - loaded, **after}
    return found


# -------------------------------------------------------------------------------------------------------------- layers


def layers(options: argparse.Namespace, findings: Findings) -> None:
    """Times of the model's layers as ``penstock profile`` measures them, for the simulator."""
    sizes = sizes_of(options)
    name = main_model(options, sizes)
    findings.add("model", name)
    with drawn_model(name, options, sizes, findings) as folder:
        profile = run_profile(
            ProfileOptions(model=folder, dtype=DTYPE, device=options.device), console=Console(quiet=True)
        )
        findings.add("times", {host: asdict(times) for host, times in profile.times.items()})
