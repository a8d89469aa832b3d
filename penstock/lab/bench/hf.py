"""Peer ``hf``: transformers' ``generate``, loaded in the process that ``worker`` runs."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.checkpoint.look import GGUF
from penstock.lab.bench.peer_worker import Answer, Ask, Setup


class Clock:
    """A streamer for ``generate`` that notes the time of each call. The first call brings the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: Any) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


class Peer:
    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup.threads)
        self.version = f"transformers {version('transformers')}"
        source = Path(setup.model)
        place = {"gguf_file": source.name} if source.suffix == GGUF else {}
        folder = source.parent if place else source
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, **place, dtype=getattr(torch, setup.dtype), trust_remote_code=False
        ).eval()

    def generate(self, ask: Ask) -> Answer:
        import torch
        from transformers import GenerationConfig

        sampling = {"do_sample": False}
        if ask.temperature > 0:
            sampling = {"do_sample": True, "temperature": ask.temperature, "top_p": ask.top_p, "top_k": ask.top_k}  # type: ignore[dict-item]
            torch.manual_seed(ask.seed)
        # No end token, so that exactly the requested number of tokens is generated.
        self._model.generation_config = GenerationConfig(max_new_tokens=ask.tokens, pad_token_id=0, **sampling)
        ids = torch.tensor([ask.token_ids])
        clock, began = Clock(), time.perf_counter()
        with torch.inference_mode():
            found = self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock)
        made = found[0, ids.shape[1] :].tolist()
        # The first moment belongs to the prompt.
        _, first, *_ = clock.moments
        return Answer(
            tokens=len(made), first_token_seconds=first - began, seconds=clock.moments[-1] - began, token_ids=made
        )
