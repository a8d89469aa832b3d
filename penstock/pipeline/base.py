"""The interface of pipelines and launchers, the plan of stages, and clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from penstock.core import MOST_RANKS, MOST_THREADS, PenstockError
from penstock.emulation.stage import StageEmulation
from penstock.files import AUTO
from penstock.messages import (
    MOST,
    MOST_LAYERS,
    Address,
    Batch,
    Cancel,
    FilePath,
    Index,
    Label,
    Message,
    Result,
)
from penstock.transport.addresses import LinkSecurity

# ----------------------------------------------------------------------------------------------------------------- plan
# The plan of a stage, and the specification of its process: plain data, sent to the fork server as JSON.


class TapSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden states that a stage sends a drafter: of these layers, to this inbox, under the drafter's session."""

    layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    address: Address
    session: Label
    host: Label = ""
    """The drafter's host, as its launcher is named; empty for the engine's own."""


Threads = Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)]


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The host of one rank of a stage, as its launcher is named, and the threads that it computes with there."""

    host: Label = ""
    threads: Threads = 1


class RankLink(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a process among the ranks of a stage on several hosts.

    All connections between the ranks begin with ``secret``, as those of a session do with the session's. The first rank
    listens for the others at ``leader``; in its own RankLink ``leader`` is None, since the address is not known before
    it listens.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    secret: Label
    leader: Address | None = None


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that one stage holds: layers [first, last) of the checkpoint in ``model``.

    It has ``capacity`` KV slots and computes in ``dtype`` on ``device``.
    """

    model: FilePath
    first: Index
    last: Index
    capacity: Index
    dtype: Label
    device: Label
    host: Label = ""
    """The host on which the stage runs, as its launcher is named; empty for the engine's own."""
    gpu: Label = ""
    """The UUID of the GPU that ``device`` names; empty for a processor, and where the number has to do."""
    quantization: Annotated[str, msgspec.Meta(max_length=4, pattern=r"\A(?:none|int8|int4)\Z")] = "none"
    """The format in which the weights are held."""
    numerics: Annotated[str, msgspec.Meta(max_length=5, pattern=r"\A(?:auto|exact|fast)\Z")] = AUTO
    """Whether a row's bits may depend on the rows beside it; a stage that cannot be exact refuses "exact"."""
    max_model_len: Index
    vocab_size: Index
    """The target's vocabulary, for a drafter, too."""
    gives_back: bool = False
    """Whether layers with a limited reach free slots that are out of reach. Only where no requests share slots."""
    threads: Threads = 1
    """Number of threads that compute, where the stage has a process of its own; its ranks share them."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1
    """Number of processes that share every layer, as the ranks of a tensor parallel group."""
    places: Annotated[tuple[RankPlace, ...], msgspec.Meta(max_length=MOST_RANKS)] = ()
    """The places of the ranks, in order, where they are not all on ``host``: the first one's is."""
    tap: TapSpec | None = None
    target: FilePath = ""
    """The target whose features a learned drafter reads; ``model`` is then the drafter's checkpoint. Else empty."""
    tokenizer: FilePath = ""
    """The checkpoint with the tokenizer for grammars, if it is not ``model``: a draft model's target."""
    emulation: StageEmulation | None = None

    @property
    def label(self) -> str:
        if self.target:
            return self.model
        return f"layers {self.first}-{self.last - 1}" if self.last > self.first else "no layers"


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a stage process needs to start: its plan, and its place in a running pipeline.

    ``process`` is the name by which its launcher knows the process for as long as that lives. ``bind`` is the address
    on which its inbox listens (a tcp port of * lets the system choose), ``engine`` the address of the engine's inbox.
    With ``security`` tcp connections use TLS; in a ``private_network`` plain ones may leave the host. On another host
    its agent fills in ``bind`` and ``security``, which are the host's own. A running process keeps both when it joins
    another pipeline.
    """

    process: Label
    session: Label
    index: Index
    stages: Annotated[int, msgspec.Meta(ge=1, lt=MOST)]
    bind: Annotated[str, msgspec.Meta(max_length=256)]
    engine: Address
    plan: StagePlan
    link: RankLink | None = None
    """The process's place among the ranks of a stage on several hosts; None elsewhere."""
    security: LinkSecurity | None = None
    private_network: bool = False


# ----------------------------------------------------------------------------------------------------------------- base
# The interface between the engine and a pipeline, however its stages are connected.


class Pipeline(Protocol):
    """Stages behind one entrance. Batches are computed strictly in the order of submission."""

    stages: int

    @property
    def ready(self) -> bool:
        """Whether the buffer in front of the first stage is free: one more batch may be submitted."""
        ...

    @property
    def last_heartbeat(self) -> list[float]:
        """Time of each stage's latest message (seconds, this pipeline's clock). It may be read from any thread.

        A stage sends nothing while it computes: a long silence is a long computation, or one that will not end.
        """
        ...

    @property
    def rank_bytes(self) -> list[list[int]]:
        """Bytes of weights, keys and values of each rank, by stage; none for a stage of one. From any thread."""
        ...

    def submit(self, batch: Batch) -> None:
        """Send a batch to the first stage, which has to be ``ready``."""
        ...

    def cancel(self, message: Cancel) -> None:
        """Send every stage the nodes whose rows it need not compute."""
        ...

    def prepare_grammar(self, request: int, grammar: str) -> None:
        """Have the last stage compile a request's grammar while it goes on with its batches."""
        ...

    def has_grammar(self, request: int) -> bool:
        """Whether the last stage has compiled the grammar, so that the request's rows do not delay others."""
        ...

    def forget_grammar(self, request: int) -> None:
        """Drop the grammar of a request that has ended or is preempted."""
        ...

    def poll(self) -> list[Result]:
        """Results that have arrived, in stream order. Never blocks. Raises PipelineLost if a stage was lost."""
        ...

    @property
    def due(self) -> float | None:
        """When ``poll`` has something without a further message (seconds, this pipeline's clock), or None."""
        ...

    def tap(self, layers: tuple[int, ...]) -> TapSpec:
        """The address to which the target's stages send these layers' states.

        This pipeline's first stage has to be a learned drafter.
        """
        ...

    def close(self) -> None:
        """Stop the stages and wait for them. Safe to call twice."""
        ...


class SideChannel(Protocol):
    """Messages to and from single stages, beside the stream."""

    def tell(self, stage: int, message: Message, arrives: float = 0.0) -> None:
        """Send a stage a message that arrives at this moment of the pipeline's clock (0: when it is received)."""
        ...

    def listen(self, listener: Callable[[Message], bool]) -> None:
        """Offer ``listener`` the stages' messages beside the stream; it returns whether a message was for it."""
        ...


class StartedPipeline(Pipeline, SideChannel, Protocol):
    """A pipeline that an executor starts. It can be used once it has ``joined``."""

    def joined(self) -> bool:
        """Whether all stages have loaded their layers and know each other.

        Ask after every message and at ``due`` until they do. Raises PipelineError when a stage cannot start.
        """
        ...

    @property
    def exact(self) -> bool:
        """Whether in all stages a row's bits depend on nothing but what it sees; to be asked once it has joined."""
        ...

    @property
    def lost(self) -> bool:
        """Whether a stage has been lost, so that ``poll`` raises PipelineLost now or soon."""
        ...

    def release(self) -> None:
        """End the stages that are lost. The others keep their layers, for a later pipeline that needs the same ones."""
        ...


class Clock(Protocol):
    """Time and waiting, real or virtual."""

    def now(self) -> float:
        """The present time in seconds, from any beginning; it never goes back."""
        ...

    def wait(self, until: float | None) -> None:
        """Return when a message may have arrived for a pipeline on this clock, when woken, or at ``until`` seconds."""
        ...

    def wake(self) -> None:
        """Make the current ``wait``, or else the next one, return at once. May be called from any thread."""
        ...


class Executor(Clock, Protocol):
    """Runs an engine's pipelines: each stage in a process of its own, or all in the engine's."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> StartedPipeline:
        """Begin to start a pipeline of these stages, without waiting for any.

        Released stages that hold the same layers are used again.
        """
        ...

    def end_unused(self) -> None:
        """End the stages that have been released and not used again."""
        ...

    def close(self) -> None:
        """Free what the executor holds. Its pipelines have to be closed before. Safe to call twice."""
        ...


# ------------------------------------------------------------------------------------------------------------ launching
# The interface for starting stage processes: through this host's fork server, or through another host's agent.


class Launcher(Protocol):
    """Starts stages on one host, and reports those that have ended. Its methods may be called from any thread."""

    @property
    def alive(self) -> bool:
        """Whether it can start stages. When it no longer can, it reports all stages that it started as ended."""
        ...

    @property
    def clock_offset(self) -> float:
        """Seconds to add to a moment of this process's clock for the same moment of the host's, roughly."""
        ...

    def listen(self, process: str, pipe: int) -> None:
        """Have the end of a process written to ``pipe`` as a line of JSON. Call it before the process starts."""
        ...

    def forget(self, process: str) -> None:
        """Report the end of a process no more."""
        ...

    def start(self, spec: StageSpec) -> None:
        """Start a stage process. A failure to start is reported like any other end."""
        ...

    def kill(self, process: str) -> None:
        """Kill a process, if it is still there."""
        ...

    def ended(self, process: str) -> bool:
        """Whether a process is known to have ended, reported or not."""
        ...


@dataclass(frozen=True)
class Elsewhere:
    """The hosts beside the engine's own."""

    launchers: Mapping[str, Launcher]
    """Host's name in plans -> its launcher."""
    reached_at: str
    """This host's address, as those hosts reach it."""
    cut_off: Callable[[str, str], None]
    """Declare the host of this name lost, with a cause: other hosts do not reach it, though this one does."""
    private_network: bool = False
    """Whether plain connections may leave this host."""


# ---------------------------------------------------------------------------------------------------------------- clock
# Virtual time, for pipelines that run in one process.


class VirtualClock:
    """Time that passes only in ``wait``. Waiting without a moment is an error: the engine would hang."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait(self, until: float | None) -> None:
        if until is None:
            raise PenstockError("nothing is due: the engine waits for something that cannot happen")
        self._now = max(self._now, until)

    def wake(self) -> None:
        """Do nothing: no wait takes any real time."""
