"""Other engines, each in a process of its own that answers a bench's questions: loading, generating, and the loop."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol, TextIO, cast

from penstock.checkpoint.look import GGUF
from penstock.cluster import Cluster
from penstock.config import FieldError, known_name
from penstock.environment import Need
from penstock.library.names import is_gguf

# ---------------------------------------------------------------------------------------------------------------- peers
# Other engines with a model loaded, and the requests that they are given.


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A peer's first message: how to load the model. ``model``: a folder or a GGUF file.

    ``at_once``: most requests that it is given together.
    """

    peer: str
    model: str
    threads: int
    dtype: str
    max_model_len: int
    at_once: int = 1


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request for exactly ``tokens`` tokens, whatever they are: no end token counts."""

    token_ids: list[int]
    tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Seconds from the request's start to its first and to its last token. Some peers do not report token ids."""

    tokens: int
    first_token_seconds: float
    seconds: float
    token_ids: list[int] | None = None


class Peer(Protocol):
    """Another engine with its model loaded.

    ``features``: those of the processor that it was built to use, for example "AVX2, FMA"; "" if it does not say.
    """

    version: str
    features: str

    def generate(self, ask: Ask) -> Answer: ...


class ManyPeer(Peer, Protocol):
    """A peer that computes several requests in one batch."""

    def generate_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer all requests; seconds count from the time at which they are given."""
        ...


class Clock:
    """A streamer for ``generate`` that notes the time of each call. The first call is the prompt's."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: Any) -> None:
        """Note the time of a token."""
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token was noted."""


class Transformers:
    """transformers' ``generate``."""

    features = ""

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup.threads)
        # A GGUF file is given as a name in a folder.
        self.version = f"transformers {version('transformers')}"
        source = Path(setup.model)
        place = {"gguf_file": source.name} if source.suffix == GGUF else {}
        folder = source.parent if place else source
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, **place, dtype=getattr(torch, setup.dtype), trust_remote_code=False
        ).eval()

    def generate(self, ask: Ask) -> Answer:
        """Generate with transformers' own loop. Sampling is seeded for each request."""
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
    """llama.cpp's server, through xllamacpp."""

    def __init__(self, setup: Setup) -> None:
        import xllamacpp

        self.version = f"llama.cpp (xllamacpp {version('xllamacpp')})"
        self.features = features_of(xllamacpp.get_system_info())
        params = xllamacpp.CommonParams()
        params.model.path = setup.model
        # llama.cpp divides the context among its slots.
        params.n_ctx = setup.max_model_len * setup.at_once
        params.n_parallel = setup.at_once
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
        self._server = xllamacpp.Server(params)

    def generate(self, ask: Ask) -> Answer:
        """Generate; llama.cpp reports how many tokens it made, but not which."""
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

    def generate_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer all: the server has a slot for each request, and batches them itself."""
        with ThreadPoolExecutor(len(asks)) as pool:
            return list(pool.map(self.generate, asks))


class NativeLlamaCpp:
    """llama.cpp, built for this processor, through the C interface in llama-cpp-python.

    The loop of llama-cpp-python copies the logits of every token to Python; this one leaves sampling to llama.cpp.
    """

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self.version = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})"
        self.features = features_of(self._lib.llama_print_system_info().decode())
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(setup.model.encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the model")
        params = self._lib.llama_context_default_params()
        params.n_ctx = setup.max_model_len * setup.at_once
        params.n_seq_max = setup.at_once
        params.n_threads = params.n_threads_batch = setup.threads
        self._batch_tokens = params.n_batch
        self._context = self._lib.llama_init_from_model(self._model, params)

    def generate(self, ask: Ask) -> Answer:
        """Answer one request."""
        (answer,) = self.generate_together([ask])
        return answer

    def generate_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Read the prompts one after another, then decode one token of every unfinished request in each batch."""
        lib, samplers = self._lib, [self._sampler(ask) for ask in asks]
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        made: list[list[int]] = [[] for _ in asks]
        moments: list[list[float]] = [[] for _ in asks]
        began = time.perf_counter()

        def sample(request: int, row: int) -> None:
            made[request].append(int(lib.llama_sampler_sample(samplers[request], self._context, row)))
            moments[request].append(time.perf_counter() - began)

        try:
            for request, ask in enumerate(asks):
                # The context decodes so many tokens at a time; only the last piece's last row is sampled from.
                for start in range(0, len(ask.token_ids), self._batch_tokens):
                    piece = ask.token_ids[start : start + self._batch_tokens]
                    self._decode([(token, start + i, request) for i, token in enumerate(piece)], all_rows=False)
                sample(request, -1)
            while left := [i for i, ask in enumerate(asks) if len(made[i]) < ask.tokens]:
                # The last token made is read at the position after the prompt and the tokens before it.
                self._decode([(made[i][-1], len(asks[i].token_ids) + len(made[i]) - 1, i) for i in left], all_rows=True)
                for row, request in enumerate(left):
                    sample(request, row)
        finally:
            for sampler in samplers:
                lib.llama_sampler_free(sampler)
        return [
            Answer(tokens=len(ids), first_token_seconds=times[0], seconds=times[-1], token_ids=ids)
            for ids, times in zip(made, moments, strict=True)
        ]

    def _decode(self, rows: Sequence[tuple[int, int, int]], *, all_rows: bool) -> None:
        """Decode (token, position, request) rows, with logits of all of them or only of the last one."""
        batch = self._lib.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, position, request) in enumerate(rows):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
                batch.logits[i] = all_rows or i == len(rows) - 1
            if self._lib.llama_decode(self._context, batch):
                raise RuntimeError("llama.cpp cannot decode a batch")
        finally:
            self._lib.llama_batch_free(batch)

    def _sampler(self, ask: Ask) -> Any:
        """llama.cpp's chain of samplers for a request, in the order top-k, top-p, temperature."""
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if ask.temperature > 0:
            parts = [lib.llama_sampler_init_top_k(ask.top_k)] if ask.top_k > 0 else []
            parts += [lib.llama_sampler_init_top_p(ask.top_p, 1), lib.llama_sampler_init_temp(ask.temperature)]
            parts.append(lib.llama_sampler_init_dist(ask.seed % 2**32))
        else:
            parts = [lib.llama_sampler_init_greedy()]
        for part in parts:
            lib.llama_sampler_chain_add(chain, part)
        return chain


def features_of(system_info: str) -> str:
    """The features in llama.cpp's line about itself: "CPU : AVX2 = 1 | FMA = 1 | " has "AVX2, FMA"."""
    return ", ".join(re.findall(r"(\w+) = 1\b", system_info))


# ---------------------------------------------------------------------------------------------------------------- names
# The known peers, the packages that they need, and the models on which they can be compared.


@dataclass(frozen=True)
class Kind:
    """A kind of peer: ``load`` loads its model, for which it imports the ``package``.

    ``same_arithmetic``: whether its tokens have to be Penstock's in float32. ``build``: the command that makes the
    package, where the extra ``peers`` does not have it.
    """

    load: Callable[[Setup], Peer]
    package: str
    same_arithmetic: bool
    build: str = ""


NATIVE_BUILD: Final = (
    f"CMAKE_ARGS=-DGGML_NATIVE=ON {shlex.quote(sys.executable)} -m pip install "
    "--no-binary llama-cpp-python llama-cpp-python"
)
"""The command that builds llama.cpp for the processor at hand; ``make peers`` does the same in a checkout."""
PEERS: Final = {
    "hf": Kind(Transformers, "transformers", same_arithmetic=True),
    "llama.cpp": Kind(LlamaCpp, "xllamacpp", same_arithmetic=False),
    "llama.cpp-native": Kind(NativeLlamaCpp, "llama_cpp", same_arithmetic=False, build=NATIVE_BUILD),
}
"""The peers by name. llama.cpp rounds activations to 8 bits wherever weights are quantised, so its
tokens may differ."""


def check_peers(names: Sequence[str], model: str, cluster: Cluster | None) -> None:
    """Raise ConfigError for a peer that is unknown, or that cannot be compared on this model or cluster."""
    for name in names:
        known_name(name, PEERS, "peer")
        if name.startswith("llama.cpp") and not is_gguf(model):
            raise FieldError("peer", f"is {name!r}, which reads GGUF files; the model is {model!r}: give one")
    if names and cluster is not None and cluster.emulated:
        raise FieldError("peer", f"computes in this host's own time, cluster {cluster.name} is emulated; use local-N")


def needs_of(names: Sequence[str]) -> list[Need]:
    """The packages that these peers need."""
    kinds = {name: PEERS[name] for name in names}
    return [Need(f"peer {name} needs", one.package, "peers", one.build) for name, one in kinds.items()]


# --------------------------------------------------------------------------------------------------------------- worker
# The process of a peer, which reads questions from standard input and writes answers to what was standard output.


def work() -> None:
    """Answer until standard input ends. What libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        # Libraries print to descriptor 1, where their output would garble the answers.
        os.dup2(2, 1)
        peer: Peer | None = None
        for line in sys.stdin:
            try:
                table = json.loads(line)
                if peer is None:
                    setup = Setup(**table)
                    peer = PEERS[setup.peer].load(setup)
                    say(out, {"version": peer.version, "features": peer.features})
                elif isinstance(table, list):
                    together = cast(ManyPeer, peer).generate_together([Ask(**one) for one in table])
                    say(out, {"answers": [asdict(answer) for answer in together]})
                else:
                    say(out, asdict(peer.generate(Ask(**table))))
            except Exception as error:
                say(out, {"error": f"{type(error).__name__}: {error}"})


def say(out: TextIO, answer: dict[str, Any]) -> None:
    """Write a message as one line."""
    out.write(json.dumps(answer) + "\n")
    out.flush()
