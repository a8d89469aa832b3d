"""Another engine in a process of its own, which answers a bench's questions."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from penstock.checkpoint.look import GGUF
from penstock.cluster import Cluster
from penstock.config import FieldError, known_name
from penstock.extras import Need
from penstock.library.names import is_gguf

# ---------------------------------------------------------------------------------------------------------------- peers
# Other engines with a model loaded, and what they are asked.


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A peer's first message: how to load the model. ``model`` is a folder or a GGUF file."""

    peer: str
    model: str
    threads: int
    dtype: str
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request for exactly ``tokens`` tokens, whatever they are."""

    token_ids: list[int]
    tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Seconds from the request's start to its first token and to its last. Not every peer reports token ids."""

    tokens: int
    first_token_seconds: float
    seconds: float
    token_ids: list[int] | None = None


class Peer(Protocol):
    """Another engine with its model loaded."""

    version: str

    def generate(self, ask: Ask) -> Answer: ...


class Clock:
    """A streamer for ``generate`` that notes the time of each call. The first call brings the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: Any) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """transformers' ``generate``."""

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


class LlamaCpp:
    """llama.cpp, through xllamacpp."""

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


# ---------------------------------------------------------------------------------------------------------------- names
# The known peers, the packages that they need, and the models that they cannot be compared on.


@dataclass(frozen=True)
class Kind:
    """A kind of peer: ``load`` loads its model, and imports the ``package`` for that.

    ``same_arithmetic``: in float32 its tokens have to be ours.
    """

    load: Callable[[Setup], Peer]
    package: str
    same_arithmetic: bool


PEERS: Final = {
    "hf": Kind(Transformers, "transformers", same_arithmetic=True),
    "llama.cpp": Kind(LlamaCpp, "xllamacpp", same_arithmetic=False),
}
"""The peers by name. llama.cpp rounds activations to 8 bits wherever weights are quantised, so its
tokens may differ."""


def check_peers(names: Sequence[str], model: str, cluster: Cluster | None) -> None:
    """Raise ConfigError for a peer that is unknown, or cannot be compared on this model or cluster."""
    for name in names:
        known_name(name, PEERS, "peer")
        if name == "llama.cpp" and not is_gguf(model):
            raise FieldError("peer", f"is {name!r}, which reads GGUF files; the model is {model!r}: give one")
    if names and cluster is not None and cluster.emulated:
        raise FieldError("peer", f"computes in this host's own time, cluster {cluster.name} is emulated; use local-N")


def needs_of(names: Sequence[str]) -> list[Need]:
    """The packages that have to be installed for these peers."""
    return [Need(f"peer {name} needs", PEERS[name].package, "peers") for name in names]


# --------------------------------------------------------------------------------------------------------------- worker
# The process of a peer: reads questions from standard input and writes answers to what was standard output.


def work() -> None:
    """Answer until standard input ends. Output of libraries goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        # Libraries print to descriptor 1, which would garble the answers: send that to standard error.
        os.dup2(2, 1)
        peer: Peer | None = None
        for line in sys.stdin:
            try:
                table = json.loads(line)
                if peer is None:
                    setup = Setup(**table)
                    peer = PEERS[setup.peer].load(setup)
                    say(out, {"version": peer.version})
                else:
                    say(out, asdict(peer.generate(Ask(**table))))
            except Exception as error:
                say(out, {"error": f"{type(error).__name__}: {error}"})


def say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()
