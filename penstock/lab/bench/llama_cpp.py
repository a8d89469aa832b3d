"""Peer ``llama.cpp``, through xllamacpp, loaded in the process that ``worker`` runs."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from penstock.lab.bench.peer_worker import Answer, Ask, Setup


class Peer:
    def __init__(self, setup: Setup) -> None:
        import xllamacpp

        self.version = f"llama.cpp (xllamacpp {version('xllamacpp')})"
        params = xllamacpp.CommonParams()
        params.model.path = setup.model
        params.n_ctx = setup.max_model_len
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
        self._server = xllamacpp.Server(params)

    def generate(self, ask: Ask) -> Answer:
        """Generate; llama.cpp reports the number of tokens, but not which."""
        request = {
            "prompt": ask.token_ids,
            "max_tokens": ask.tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            "min_p": 0.0,
            "seed": ask.seed % 2**32,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        moments: list[float] = []
        used: list[int] = []

        def take(chunk: Any) -> bool:
            if isinstance(chunk, dict) and chunk.get("usage"):
                used.append(chunk["usage"]["completion_tokens"])
            elif any(choice.get("text") for choice in chunk.get("choices", ())):
                moments.append(time.perf_counter())
            return False

        began = time.perf_counter()
        self._server.handle_completions(request, take)
        if not used or not moments:
            raise RuntimeError("it has made no token")
        return Answer(tokens=used[-1], first_token_seconds=moments[0] - began, seconds=moments[-1] - began)
